"""Train on many devices from a notebook cell.

Importing this package touches no device, starts no process and sets no environment variable: each
public name, listed in ``__init__.pyi``, is imported when it is first used. In a notebook's kernel,
the first use of ``notebook_launcher`` also starts the process from which ranks will be forked.
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
    """Import a public name, ``__version__`` or a submodule when it is looked up (PEP 562).

    ``notebook_launcher`` also starts the process from which ranks will be forked, in a kernel.
    """
    if name in __all__:
        if name == "notebook_launcher":
            from notebook_accel.notebook.warming import warm_kernel

            # First: the process imports while this one does.
            warm_kernel()
        return _fetch(name)
    if name == "__version__":
        # Scripts ask for a minimum version of Accelerate: the one whose interface this is stands
        # before our own.
        return f"1.15.0+notebook.accel.{importlib.metadata.version('notebook-accel')}"
    if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
