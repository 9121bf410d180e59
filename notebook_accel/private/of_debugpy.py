"""The only place where names of debugpy's debugger, pydevd, are used; a release may change them."""

from __future__ import annotations

import contextlib
import sys
from contextlib import AbstractContextManager
from typing import Any


def without_debugger() -> AbstractContextManager[None]:
    """Return a context in which processes that this thread starts get no debugger.

    A notebook's debugger (JupyterLab's, VS Code's) rewrites the command of each Python process that
    is started, and the process then waits for a debugger that nobody attaches. This uses
    ``pydev_monkey.skip_subprocess_arg_patch``. If pydevd removed it, launches would hang while the
    debugger is on.
    """
    # None until a debugger was attached to this process.
    patches: Any = sys.modules.get("_pydev_bundle.pydev_monkey")
    skip = getattr(patches, "skip_subprocess_arg_patch", contextlib.nullcontext)
    found: AbstractContextManager[None] = skip()
    return found
