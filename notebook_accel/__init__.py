"""Train on many devices from a notebook cell.

Importing this package touches no device, starts nothing and writes no environment: the public
names, listed in ``__init__.pyi``, are imported when they are first used. In a notebook's kernel,
fetching ``notebook_launcher`` also starts the process from which ranks will be forked.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from typing import Any

import lazy_loader

# The doors in compat/ open under the paths that Accelerate's users import.
__path__ = [*__path__, f"{__path__[0]}/compat"]
_fetch, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    """Give a public name, the version, or a module: ``accelerate.utils.set_seed`` needs no import
    of ``accelerate.utils``, which Accelerate's own start has done."""
    if name in __all__:
        if name == "notebook_launcher":
            from notebook_accel.notebook.warming import warm_kernel

            # First: the process imports while this one does.
            warm_kernel()
        return _fetch(name)
    if name == "__version__":
        return importlib.metadata.version("notebook-accel")
    if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
