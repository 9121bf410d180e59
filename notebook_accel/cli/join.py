"""``notebook-accel join HOST:PORT``: lends this machine to a launch in a notebook elsewhere."""

from __future__ import annotations

import os
from argparse import ArgumentParser
from importlib import import_module
from typing import TYPE_CHECKING

from notebook_accel.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["join"]


def join(arguments: Sequence[str]) -> int:
    """``notebook-accel join HOST:PORT --token TOKEN``: run ranks of a launch on this machine."""
    parser = ArgumentParser(prog="notebook-accel join", description=join.__doc__)
    parser.add_argument("address", metavar="HOST:PORT", help="as the launch in the notebook says")
    parser.add_argument("--token", help="as the launch says; else NOTEBOOK_ACCEL_JOIN_TOKEN")
    typed = parser.parse_args(arguments)
    token = typed.token or os.environ.get("NOTEBOOK_ACCEL_JOIN_TOKEN", "")
    if not token:
        raise ConfigError("a token is needed: --token, as the launch in the notebook says")
    elastic = import_module("notebook_accel.launch.engines.elastic")
    return int(elastic.join(typed.address, token) or 0)
