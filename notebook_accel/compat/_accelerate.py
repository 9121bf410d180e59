"""Fetches names that this package lacks from Hugging Face Accelerate, if it is installed.

Such names are big-model loading and offloading with their hooks, checks for libraries, constants,
and most trackers. A module of ``compat/`` looks them up in Accelerate's module of the same path,
which is imported when a name is first looked up. If Accelerate is not installed, the value is a
:class:`Missing`: importing the name succeeds, and only using it raises an error.

Code may put this package in Accelerate's place (``sys.modules["accelerate"] = notebook_accel``).
Accelerate's own files are then imported as submodules of this module, whose ``__path__`` is
Accelerate's folder. That works since these files import each other by relative names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from notebook_accel.training.processes import topology
from notebook_accel.training.processes.topology import Topology

__all__ = ["Missing", "door", "open_below"]


def _folder() -> list[str]:
    """Ask the import finders: ``sys.modules["accelerate"]`` may be this package; [] for none."""
    for finder in sys.meta_path:
        spec = finder.find_spec("accelerate", None)
        if spec is not None:
            return [*(spec.submodule_search_locations or ())]
    return []


__path__ = _folder()


def door(path: str) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for Accelerate's module; a :class:`Missing` if not installed."""

    def fetch(name: str) -> Any:
        if name.startswith("__") or not (__path__ or name[0].isalpha()):
            raise AttributeError(f"module 'notebook_accel.{path}' has no attribute {name!r}")
        return getattr(_load(path), name) if __path__ else Missing(f"{path}.{name}")

    return fetch


def open_below(package: str, path: str, names: Sequence[str]) -> None:
    """Make submodules ``names``, each with all public names of ``package``.

    ``path`` is the parent's place below ``accelerate``; other names come from there (:func:`door`).
    """
    above = sys.modules[package]
    ours = {name: value for name, value in vars(above).items() if not name.startswith("_")}
    for name in names:
        below = module_from_spec(ModuleSpec(f"{package}.{name}", None))
        vars(below).update(ours, __getattr__=door(f"{path}.{name}"))
        sys.modules[below.__name__] = below
        setattr(above, name, below)


def _load(path: str) -> ModuleType:
    is_replaced = sys.modules.get("accelerate") is sys.modules["notebook_accel"]
    root = __name__ if is_replaced else "accelerate"
    import_module(f"{root}.utils")  # its modules need each other in a circle, which begins there
    module = import_module(f"{root}.{path}")
    topology.tell(_make_state)
    return module


def _make_state(here: Topology) -> None:
    """Fill Accelerate's ``PartialState``, by which its trackers and loggers find the main process.

    By itself it sees several ranks only on GPUs: on the CPU each would be the main process.
    """
    for root in ("accelerate", __name__):
        module: Any = sys.modules.get(f"{root}.state")
        # Modules of Accelerate that name it in full come here while it is being imported.
        if hasattr(module, "PartialState"):
            module.PartialState._shared_state.update(
                _cpu=here.device.type == "cpu",
                backend=here.backend,
                debug=False,
                device=here.device,
                distributed_type=module.DistributedType(str(here.distributed_type)),
                fork_launched=False,
                local_process_index=here.local_process_index,
                num_processes=here.num_processes,
                process_index=here.process_index,
            )


class Missing:
    """Stands for a name of Accelerate that is not installed: to use it is an ImportError."""

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

    __call__ = __mro_entries__ = _raise
