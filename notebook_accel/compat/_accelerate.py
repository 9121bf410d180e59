"""Accelerate itself: what the doors give of it, where it is installed.

Loading and offloading of big models with its hooks, probes of libraries, constants, most trackers:
a name that is not ours comes from Accelerate's module of the same path, which is imported when the
name is first asked for. Where Accelerate is not installed, a name is a :class:`Missing`, so that a
line which imports ten names runs, and only the use of one that is not there raises.

Code that puts our package in Accelerate's place (``sys.modules["accelerate"] = notebook_accel``)
finds ours under its name. Accelerate's files are then imported as submodules of this module, whose
``__path__`` is their folder: they import each other by relative names.
"""

from __future__ import annotations

import sys
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from notebook_accel.training import environment, topology

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

__all__ = ["Missing", "door"]


def _folder() -> list[str]:
    """Where Accelerate is installed: asked of the finders, which do not look into sys.modules."""
    for finder in sys.meta_path:
        spec = finder.find_spec("accelerate", None)
        if spec is not None:
            return [*(spec.submodule_search_locations or ())]
    return []


__path__ = _folder()
_DOORS = Path(__file__).parent


def door(path: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of a door: the names of Accelerate's module ``path`` that are not ours.

    Args:
        path: such as "utils.modeling".
    """

    def fetch(name: str) -> Any:
        if name.startswith("__") or not (__path__ or name[0].isalpha()):
            raise AttributeError(f"module 'notebook_accel.{path}' has no attribute {name!r}")
        if (_DOORS / path.replace(".", "/") / f"{name}.py").exists():  # a door below this one
            return import_module(f"notebook_accel.{path}.{name}")
        return getattr(_load(path), name) if __path__ else Missing(f"{path}.{name}")

    return fetch


def _load(path: str) -> ModuleType:
    is_replaced = sys.modules.get("accelerate") is sys.modules["notebook_accel"]
    root = __name__ if is_replaced else "accelerate"
    import_module(f"{root}.utils")  # its modules need each other in a circle, which begins there
    module = import_module(f"{root}.{path}")
    # Those that name Accelerate in full come here while it is being imported.
    if hasattr(sys.modules.get(f"{root}.state"), "PartialState"):
        _let_it_see_ranks(sys.modules[f"{root}.state"].PartialState)
    return module


def _let_it_see_ranks(state: Any) -> None:
    """Let Accelerate's ``PartialState()`` look for other ranks on the CPU too.

    By itself it does so on a GPU or for ``PartialState(cpu=True)``. Elsewhere each of several ranks
    is told that it is alone, so that each would write what a tracker logs.
    """
    made: Any = state.__init__
    if hasattr(made, "__wrapped__"):
        return

    @wraps(made)
    def make(self: Any, cpu: bool = False, **kwargs: Any) -> None:
        made(self, cpu or _is_one_of_several_on_the_host(), **kwargs)

    state.__init__ = make


def _is_one_of_several_on_the_host() -> bool:
    if topology.is_established():
        here = topology.topology()
        return here.num_processes > 1 and here.device.type == "cpu"
    return environment.read_flag("USE_CPU") and topology.count_ranks()[0] > 1


class Missing:
    """A name that would come from Accelerate, which is not installed: its use raises."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"<accelerate.{self._name}, which is not installed>"

    def _raise(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise ImportError(
            f"accelerate.{self._name} is none of notebook_accel's own names: it comes from Hugging "
            "Face Accelerate, which is not installed. Run pip install 'notebook-accel[accelerate]'"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # who copies, pickles or shows an object asks for such names
            raise AttributeError(name)
        self._raise()

    # Called, derived from, compared with isinstance(), or used as a text, a path or a list.
    __call__ = __mro_entries__ = __instancecheck__ = __subclasscheck__ = _raise
    __str__ = __format__ = __fspath__ = __iter__ = __contains__ = __getitem__ = __len__ = _raise
