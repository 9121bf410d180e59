"""Which public names of Hugging Face Accelerate work here: writes docs/accelerate_names.md.

``.venv/bin/python docs/coverage.py`` writes it anew. Names are asked of the installed library by
``dir()`` and their arguments by ``inspect.signature``; a test says when the page is out of date.
"""

from __future__ import annotations

import importlib
import inspect
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import notebook_accel

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["PAGE", "is_here", "missing_arguments", "page", "public_names"]

PAGE = Path(__file__).parent / "accelerate_names.md"
PEER = "accelerate"
MODULES = (
    "",
    "accelerator",
    "big_modeling",
    "checkpointing",
    "data_loader",
    "hooks",
    "inference",
    "launchers",
    "local_sgd",
    "logging",
    "optimizer",
    "parallelism_config",
    "scheduler",
    "state",
    "tracking",
    "utils",
)
# What stands there is only to say that something is not there.
NOT_BUILT = "notebook_accel.training.not_built"
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def public_names(module: ModuleType) -> list[str]:
    """The names that a module of the library offers and that are its own."""
    names = sorted(name for name in dir(module) if not name.startswith("_"))
    return [name for name in names if _is_own(getattr(module, name), module)]


def _is_own(value: Any, module: ModuleType) -> bool:
    if inspect.ismodule(value):
        return False
    if not (inspect.isclass(value) or inspect.isfunction(value)):
        return module.__name__ == f"{PEER}.utils" and isinstance(value, str)
    home = getattr(value, "__module__", "")
    # At the top and in utils all that is gathered counts; elsewhere what the module defines.
    gathered = module.__name__ in (PEER, f"{PEER}.utils")
    return home.startswith(f"{PEER}.") if gathered else home == module.__name__


def missing_arguments(theirs: Any, ours: Any) -> list[str]:
    """The arguments that the library's function or class takes and ours does not."""
    try:
        wanted = inspect.signature(theirs).parameters
        there = inspect.signature(ours).parameters
    except (TypeError, ValueError):
        return []
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in there.values()):
        return []
    return [
        name for name, each in wanted.items() if name not in there and each.kind not in VARIADIC
    ]


def page() -> str:
    """The text of the page."""
    sections = [_section(name) for name in MODULES]
    return "\n".join([_HEAD.format(version=version(PEER)), *sections, _methods()])


_HEAD = """\
# Names of Hugging Face Accelerate

Made by `.venv/bin/python docs/coverage.py` against accelerate {version}: the public names of the
modules below, and whether the same path under `notebook_accel` has them. `yes`: it is there;
`refused`: it can be made, and what would use it raises a `ConfigError` that says what there is, as
`Accelerator(megatron_lm_plugin=)` and `torch_tp_plugin=` do; `no`: an `ImportError`. Where ours
takes fewer arguments, they are named.
"""


def _section(name: str) -> str:
    theirs = importlib.import_module(f"{PEER}.{name}" if name else PEER)
    ours = _ours(name)
    found = {each: getattr(ours, each, None) for each in public_names(theirs)}
    title = f"`{PEER}.{name}`" if name else f"`{PEER}`"
    rows = [_row(each, getattr(theirs, each), value) for each, value in found.items()]
    return _table(f"{title}: {_count(found)}", rows)


def _ours(name: str) -> Any:
    if not name:
        return notebook_accel
    try:
        return importlib.import_module(f"notebook_accel.{name}")
    except ModuleNotFoundError:
        return None


def _methods() -> str:
    theirs, ours = importlib.import_module(PEER).Accelerator, notebook_accel.Accelerator
    names = [name for name in dir(theirs) if not name.startswith("_")]
    found = {name: getattr(ours, name, None) for name in names}
    rows = [_row(name, getattr(theirs, name), value) for name, value in found.items()]
    return _table(f"`Accelerator`: {_count(found)}", rows)


def _count(found: dict[str, Any]) -> str:
    return f"{sum(is_here(value) == 'yes' for value in found.values())} of {len(found)}"


def is_here(ours: Any) -> str:
    """What the page says of a name, by our value of it; None where there is none."""
    if ours is None:
        return "no"
    return "refused" if getattr(ours, "__module__", "") == NOT_BUILT else "yes"


def _row(name: str, theirs: Any, ours: Any) -> str:
    here = is_here(ours)
    if here != "yes":
        return f"| `{name}` | {here} | |"
    lacking = missing_arguments(theirs, ours)
    return f"| `{name}` | yes | {', '.join(f'`{each}`' for each in lacking)} |"


def _table(title: str, rows: list[str]) -> str:
    head = ["| name | here | without |", "|---|---|---|"]
    return "\n".join([f"## {title}", "", *head, *rows, ""])


if __name__ == "__main__":
    PAGE.write_text(page())
