"""Train on many devices from a notebook cell.

Importing this package touches no device, starts nothing and writes no environment: the public
names, listed in ``__init__.pyi``, are imported when they are first used. In a notebook's kernel,
fetching ``notebook_launcher`` also starts the process from which ranks will be forked.
"""

from __future__ import annotations

import lazy_loader

# The doors in compat/ open under the paths that Accelerate's users import.
__path__ = [*__path__, f"{__path__[0]}/compat"]
_fetch, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("notebook-accel")
    found = _fetch(name)
    if name == "notebook_launcher":
        from notebook_accel.notebook.warming import warm_kernel

        warm_kernel()
    return found
