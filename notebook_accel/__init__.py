"""Train on many devices from a notebook cell.

Importing this package touches no device, starts nothing and writes no environment: the public
names, listed in ``__init__.pyi``, are imported when they are first used.
"""

from __future__ import annotations

import lazy_loader

# The doors in compat/ open under the paths that Accelerate's users import.
__path__ = [*__path__, f"{__path__[0]}/compat"]
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
