"""``notebook-accel config``: asks for the settings of launches, and saves them.

It asks for the settings that the notebook's form (``config_picker``) shows without unfolding, and
for the options of one kind of parallelism.
"""

from __future__ import annotations

import os
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from notebook_accel.config import LaunchConfig, default_config_path, settings_of, write_basic_config
from notebook_accel.config.launch_config import settings_in_file
from notebook_accel.config.plugins import PLUGINS
from notebook_accel.config.setting import Setting
from notebook_accel.errors import ConfigError


def config(arguments: Sequence[str]) -> int:
    """``notebook-accel config``: ask for the settings in the terminal, and save them.

    ``default`` writes the defaults, if there is no file; ``convert`` takes Accelerate's file.
    """
    parser = ArgumentParser(
        prog="notebook-accel config",
        description="Ask for the settings of launches, with those saved before as defaults. "
        "`default` asks nothing, and leaves a file that is there as it is. `convert` takes them "
        "from a file of `accelerate config`.",
    )
    parser.add_argument("what", nargs="?", choices=("default", "convert"))
    parser.add_argument("source", nargs="?", help="of `convert`; Accelerate's own default file")
    parser.add_argument("--config_file", "--config-file", help="where to save; the default file")
    parser.add_argument("--mixed_precision", "--mixed-precision", default="no", help="of `default`")
    typed = parser.parse_args(arguments)
    path = Path(typed.config_file) if typed.config_file else default_config_path()
    if typed.what == "default":
        if not write_basic_config(typed.mixed_precision.lower(), path):
            print(f"{path} is there already, and stays as it is")
            return 0
    elif typed.what == "convert":
        cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
        home = os.environ.get("HF_HOME", f"{cache}/huggingface")
        found, notices = settings_in_file(typed.source or f"{home}/accelerate/default_config.yaml")
        for line in notices:
            print(line)
        LaunchConfig(**found).save(path)
    else:
        _asked(path).save(path)
    saved = "a launch with --config_file" if typed.config_file else "every launch"
    print(f"saved as {path}, which {saved} uses:\n{path.read_text(encoding='utf-8').rstrip()}")
    return 0


def _asked(path: Path) -> LaunchConfig:
    before = settings_in_file(path)[0] if path.exists() else {}
    rows = {name: row for name, row in settings_of(LaunchConfig).items() if row.is_first}
    answers = {**before, **_ask_all(rows, before)}
    was = next((name for name in PLUGINS if before.get(name) is not None), "none")
    kinds = ("none", *PLUGINS)
    while (chosen := _answer("Parallelism", ", ".join(kinds), was) or was) not in kinds:
        print(f"  {chosen!r} is none of these")
    for name in PLUGINS:
        answers.pop(name, None)
    if chosen != "none":
        answers[chosen] = _ask_all(PLUGINS[chosen].options, before.get(chosen) or {})
    return LaunchConfig(**answers)


def _ask_all(rows: Mapping[str, Setting], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values by name, without Nones; an empty answer keeps the value ``before``."""
    found = {name: _ask(name, row, before.get(name)) for name, row in rows.items()}
    return {name: value for name, value in found.items() if value is not None}


def _ask(name: str, row: Setting, before: Any) -> Any:
    """Ask until the answer is valid; an empty one is ``before``, or else the default."""
    about = row.about.replace("``", "`")
    if row.choices:
        about += f" ({', '.join(row.choices)})"
    value = row.default if before is None else before
    shown = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else value
    while True:
        text = _answer(row.label or name, about, row.unset if value is None else shown)
        try:
            return row.checked(name, row.from_text(text)) if text else value
        except ConfigError as error:
            print(f"  {error}")


def _answer(label: str, about: str, default: Any) -> str:
    """Return "" if the user only pressed Enter; ConfigError if standard input has ended."""
    try:
        return input(f"{label}: {about}\n  [{default}] ").strip()
    except (EOFError, RuntimeError):  # the second: it was closed from the start
        raise ConfigError(
            "there is nobody to answer: `notebook-accel config default` asks nothing"
        ) from None
