"""The kernel's handle of a template: what it is asked, and what it answers."""

from __future__ import annotations

import os

import pytest

from notebook_accel.errors import LaunchError
from notebook_accel.launch.template.handle import template


def test_devices_that_cannot_be_counted_are_not_taken_for_none() -> None:
    source = template()
    # No process can have a variable with this name, so the child that counts fails. "VISIBLE" in
    # it makes it a question of its own: answers are kept by the variables that choose devices.
    with pytest.raises(LaunchError, match=r"(?s)could not be counted.*devices='cpu'.*ValueError"):
        source.count_devices({**os.environ, "VISIBLE=": "1"})
    assert source.count_devices(dict(os.environ)).kind
