"""What machines prove to each other."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from notebook_accel.launch.transport.machine_link import Token

if TYPE_CHECKING:
    import pytest


def test_a_token_is_no_option_of_a_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = [b"\xf8" * 16, b"\x00" * 16]
    monkeypatch.setattr(secrets, "token_bytes", lambda _: drawn.pop(0))
    assert str(Token.new(b"\x00" * 32)).startswith("A")
