"""The environment, read as flags and numbers."""

from __future__ import annotations

import pytest

from notebook_accel.errors import ConfigError
from notebook_accel.training.settings.environment import get_int_from_env, parse_flag_from_env


def test_variables_are_read_or_defaults_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AN_INT", "3")
    monkeypatch.setenv("A_FLAG", "yes")
    monkeypatch.delenv("NOTHING", raising=False)
    assert get_int_from_env(["NOTHING", "AN_INT"], 1) == 3
    assert get_int_from_env(["NOTHING"], 1) == 1
    assert parse_flag_from_env("A_FLAG") is True
    assert parse_flag_from_env("NOTHING", default=True) is True
    with pytest.raises(ConfigError, match="AN_INT='3': expected true or false"):
        parse_flag_from_env("AN_INT")
