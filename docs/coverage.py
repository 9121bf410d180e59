"""Which public names of Hugging Face Accelerate work here: writes docs/accelerate_names.md.

``.venv/bin/python docs/coverage.py`` writes it anew. All is asked of the installed library: names
by ``dir()``, arguments by ``inspect.signature``, and what objects have beside the members of their
class by the assignments to ``self`` in its source. A test says when the page is out of date.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import pkgutil
import sys
import textwrap
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from notebook_accel.training import plan

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import ModuleType

__all__ = ["PAGE", "differences", "has_member", "is_here", "members", "page", "public_names"]

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
# These gather what others define; elsewhere what the module itself defines counts.
GATHERING = (PEER, f"{PEER}.utils")
WITH_CONSTANTS = (f"{PEER}.utils", f"{PEER}.utils.constants")
# What stands there is refused where it is used: settings, which can be made, and what cannot.
NOT_MADE = "notebook_accel.training.refused"
NOT_BUILT = ("notebook_accel.training.not_built", NOT_MADE)
# Arguments that ours takes as **kwargs, by the name of the class or function.
TAKEN: dict[str, set[str]] = {}
REFUSED = {"Accelerator": set(plan.UNBUILT)}
# What some of ours ask for an attribute that they lack.
BEHIND = {"AcceleratedOptimizer": Optimizer, "AcceleratedScheduler": LRScheduler}
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def public_names(module: ModuleType) -> list[str]:
    """The names that a module of the library offers and that are its own."""
    names = sorted(name for name in dir(module) if not name.startswith("_"))
    return [name for name in names if _is_own(name, getattr(module, name), module.__name__)]


def _is_own(name: str, value: Any, module: str) -> bool:
    if inspect.ismodule(value):
        return False
    # Behind a cache, say; an instance is no function, but a constant.
    if not (inspect.isclass(value) or inspect.isfunction(inspect.unwrap(value))):
        return module in WITH_CONSTANTS and name.isupper() and not callable(value)
    home = getattr(value, "__module__", "")
    return home.startswith(f"{PEER}.") if module in GATHERING else home == module


def members(kind: type) -> list[str]:
    """What a class of the library gives to those who have it or an object of it.

    That are methods, properties, fields and members of an enumeration, and what its methods assign
    to ``self``; without what it has from other libraries.
    """
    own = [each for each in kind.__mro__ if each.__module__.startswith(PEER)]
    return sorted(name for name in _names_in(own) if not name.startswith("_"))


def has_member(kind: type, name: str) -> bool:
    """Whether a class of ours, or an object of it, has a member of this name."""
    own = [each for each in kind.__mro__ if each.__module__.startswith("notebook_accel")]
    behind = [BEHIND[each.__name__] for each in own if each.__name__ in BEHIND]
    return any(hasattr(each, name) for each in (kind, *behind)) or name in _names_in(own)


def _names_in(classes: Iterable[type]) -> set[str]:
    return {
        name
        for each in classes
        for name in (
            *vars(each),
            *vars(each).get("__annotations__", ()),
            *getattr(each, "__members__", ()),
            *_assigned(each),
        )
    }


def _assigned(kind: type) -> frozenset[str]:
    """The attributes that the methods of a class assign to ``self``."""
    return _assigned_in(str(sys.modules[kind.__module__].__file__)).get(kind.__name__, frozenset())


@functools.cache
def _assigned_in(file: str) -> dict[str, frozenset[str]]:
    """The same by the names of all classes in a file, which is parsed once."""
    tree = ast.parse(Path(file).read_text())
    classes = [each for each in ast.walk(tree) if isinstance(each, ast.ClassDef)]
    return {
        each.name: frozenset(
            node.attr
            for node in ast.walk(each)
            if isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        )
        for each in classes
    }


def differences(theirs: Any, ours: Any, name: str = "") -> list[str]:
    """In which arguments ours is called differently, each as a text for the page.

    Args:
        theirs: a function or class of the library.
        ours: what has its name here.
        name: which of the tables of arguments behind ``**kwargs`` counts.
    """
    if not (callable(theirs) and callable(ours)):
        return [] if callable(theirs) or _same(theirs, ours) else ["another value"]
    try:
        wanted = inspect.signature(theirs).parameters
        there = inspect.signature(ours).parameters
    except (TypeError, ValueError):
        return []
    refused = [each for each in wanted if each in REFUSED.get(name, ())]
    behind = {*refused, *TAKEN.get(name, ())}
    named = {key: each for key, each in wanted.items() if each.kind not in _VARIADIC}
    lacking = [key for key in named if key not in there and key not in behind]
    found = [_listed("without", [key for key in lacking if not key.startswith("_")])]
    found.append(_listed("refuses", refused))
    found.append(_by_name_alone(wanted, there))
    found += [
        f"`{key}={_shown(there[key].default)}`, there `{_shown(each.default)}`"
        for key, each in named.items()
        if key in there and each.default is not each.empty
        if not _same(each.default, there[key].default)
    ]
    return [text for text in found if text]


def _listed(word: str, names: Iterable[str]) -> str:
    names = list(names)
    return f"{word} {', '.join(f'`{name}`' for name in names)}" if names else ""


def _by_name_alone(wanted: Any, there: Any) -> str:
    """Which arguments must be given by name here, and may be given by position there."""
    if any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in there.values()):
        return ""
    theirs = [key for key, each in wanted.items() if each.kind in _POSITIONAL]
    ours = [key for key, each in there.items() if each.kind in _POSITIONAL]
    moved = [key for place, key in enumerate(theirs) if ours[place : place + 1] != [key]]
    if ours in ([], ["self"]) and len(moved) > 3:
        return "all arguments by name alone"
    return _listed("by name alone:", [key for key in moved if key in there])


def _same(theirs: Any, ours: Any) -> bool:
    if callable(theirs) and callable(ours):
        return getattr(theirs, "__name__", "") == getattr(ours, "__name__", "")
    if isinstance(theirs, (list, set)) and isinstance(ours, (list, set)):
        return sorted(map(str, theirs)) == sorted(map(str, ours))
    # A field that is made anew each time says nothing of its value.
    return theirs == ours or _plain(theirs) == _plain(ours) or repr(ours) == "<factory>"


def _plain(value: Any) -> str:
    return str(getattr(value, "value", value))


def _shown(value: Any) -> str:
    if value is inspect.Parameter.empty:
        return "needed"
    text = repr(getattr(value, "value", value)).replace(str(Path.home()), "~")
    return f"a {type(value).__name__}" if " at 0x" in text else text


def is_here(ours: Any) -> str:
    """What the page says of a name, by our value of it; None where there is none."""
    if ours is None:
        return "no"
    return "refused" if getattr(ours, "__module__", "") in NOT_BUILT else "yes"


def page() -> str:
    """The text of the page."""
    names = (*MODULES, *_modules_of_utils())
    seen = set[type]()
    sections = [_section(name, seen) for name in names]
    return "\n".join([_HEAD.format(version=version(PEER)), *sections])


_HEAD = """\
# Names of Hugging Face Accelerate

Made by `.venv/bin/python docs/coverage.py` against accelerate {version}: the public names of the
modules below, the members of their classes, and whether the same path under `notebook_accel` has
them. What is alike in name, arguments and defaults is listed first; the tables have the rest. `no`:
an `ImportError` or `AttributeError`; `refused`: it can be imported, and settings can be made, and
its use raises a `ConfigError` that says what there is, as `Accelerator(megatron_lm_plugin=)` and
`torch_tp_plugin=` do; `yes`: it is there, and its arguments or defaults differ as the table says.
The members of a class stand where the class is met first, with what its methods assign to `self`,
much of which Accelerate keeps for itself, and without what it has from torch.
"""


def _modules_of_utils() -> list[str]:
    found = importlib.import_module(f"{PEER}.utils")
    names = sorted(f"utils.{info.name}" for info in pkgutil.iter_modules(found.__path__))
    return [name for name in names if _imported(f"{PEER}.{name}") is not None]


def _imported(path: str) -> Any:
    try:
        return importlib.import_module(path)
    except ImportError:  # of ours: there is no such door; of theirs: a library is not there
        return None


def _section(name: str, seen: set[type]) -> str:
    path = f"{PEER}.{name}" if name else PEER
    theirs, ours = importlib.import_module(path), _imported(path.replace(PEER, "notebook_accel", 1))
    names = public_names(theirs)
    alike, rows = list[str](), list[str]()
    alike_in: dict[str, list[str]] = {}
    for each in names:
        value, here = getattr(theirs, each), getattr(ours, each, None)
        _compare(each, value, here, alike, rows)
        if inspect.isclass(value) and value not in seen and _has_members(here):
            seen.add(value)
            for member in members(value):
                _compare_member(each, member, value, here, alike_in.setdefault(each, []), rows)
    num_here = sum(is_here(getattr(ours, each, None)) == "yes" for each in names)
    return _text(f"`{path}`: {num_here} of {len(names)}", {"": alike, **alike_in}, rows)


def _has_members(ours: Any) -> bool:
    return ours is not None and getattr(ours, "__module__", "") != NOT_MADE


def _compare(path: str, theirs: Any, ours: Any, alike: list[str], rows: list[str]) -> None:
    """Put a name among those that are alike, or into the table."""
    here = is_here(ours)
    texts = differences(theirs, ours, path) if here == "yes" else []
    if here == "yes" and not texts:
        alike.append(path.rpartition(".")[2])
    else:
        rows.append(f"| `{path}` | {here} | {'; '.join(texts)} |")


def _compare_member(
    kind: str, name: str, theirs: type, ours: type, alike: list[str], rows: list[str]
) -> None:
    if not has_member(ours, name):
        rows.append(f"| `{kind}.{name}` | no |  |")
        return
    value, here = getattr(theirs, name, None), getattr(ours, name, None)
    if inspect.isroutine(value) and inspect.isroutine(here):
        _compare(f"{kind}.{name}", value, here, alike, rows)
    else:
        alike.append(name)


def _text(title: str, alike: dict[str, list[str]], rows: list[str]) -> str:
    parts = [f"## {title}", ""]
    for kind, names in alike.items():
        if names:
            listed = ", ".join(f"`{name}`" for name in names)
            start = f"Alike in `{kind}`" if kind else "Alike"
            parts += [textwrap.fill(f"{start}: {listed}.", 100, break_on_hyphens=False), ""]
    if rows:
        parts += ["| name | here | arguments |", "|---|---|---|", *rows, ""]
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
