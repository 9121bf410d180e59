"""The environment: emptied, put back, and read as flags and numbers."""

from __future__ import annotations

import asyncio
import os

import pytest
from accelerate.utils import environment as peer

from notebook_accel.errors import ConfigError
from notebook_accel.training.environment import (
    clear_environment,
    get_int_from_env,
    parse_choice_from_env,
    parse_flag_from_env,
    purge_accelerate_environment,
    str_to_bool,
)


def test_an_emptied_environment_is_put_back() -> None:
    before = dict(os.environ)
    with clear_environment():
        assert dict(os.environ) == {}
        os.environ["NEW_ONE"] = "1"
    assert dict(os.environ) == before


def test_a_function_leaves_no_variables_of_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_OLD", "before")
    monkeypatch.delenv("ACCELERATE_NEW", raising=False)

    def dirty() -> None:
        os.environ.update(ACCELERATE_OLD="after", ACCELERATE_NEW="1")

    async def dirty_later() -> None:
        dirty()

    class Case:
        def test_it(self) -> None:
            dirty()

        def tool(self) -> None:
            dirty()

    cleaned = purge_accelerate_environment(Case)()
    for call in (
        purge_accelerate_environment(dirty),
        cleaned.test_it,
        lambda: asyncio.run(purge_accelerate_environment(dirty_later)()),
    ):
        call()
        assert os.environ["ACCELERATE_OLD"] == "before"
        assert "ACCELERATE_NEW" not in os.environ
    cleaned.tool()
    assert os.environ.pop("ACCELERATE_NEW") == "1"


@pytest.mark.parametrize("text", ["yes", "No", "TRUE", "0", "on", "f", "y"])
def test_texts_are_the_flags_that_they_are_for_accelerate(text: str) -> None:
    assert str_to_bool(text) == peer.str_to_bool(text)
    assert str_to_bool(text, to_bool=True) is peer.str_to_bool(text, to_bool=True)


def test_variables_are_read_or_defaults_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError):
        str_to_bool("perhaps")
    monkeypatch.setenv("AN_INT", "3")
    monkeypatch.setenv("A_FLAG", "yes")
    monkeypatch.delenv("NOTHING", raising=False)
    assert get_int_from_env(["NOTHING", "AN_INT"], 1) == 3
    assert get_int_from_env(["NOTHING"], 1) == 1
    assert parse_flag_from_env("A_FLAG") is True
    assert parse_flag_from_env("NOTHING", default=True) is True
    with pytest.raises(ConfigError, match="AN_INT='3': expected true or false"):
        parse_flag_from_env("AN_INT")
    assert parse_choice_from_env("A_FLAG") == "yes"
    assert parse_choice_from_env("NOTHING") == "no"
