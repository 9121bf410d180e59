"""What of torch's private parts is replaced in a rank, all of it here.

Each replacement is made only where torch has what is replaced, and each has a test against the
torch that constraints.txt pins.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["keep_backward_from_stashing", "watch_new_groups"]

_KEY = "context"


def keep_backward_from_stashing() -> None:
    """Keep a rank on the CPU from hanging when it drops its model after its process group.

    A backward leaves a Python object with each of gloo's reductions, whose threads need the GIL
    to let go of it. Whoever drops the last reference to the group while holding the GIL joins
    those threads: that is a model whose group was destroyed before, as many functions end
    (pytorch/pytorch#56297 is the general case). The object is for the threads of a backward on
    accelerators; on the CPU it is needed by nobody.
    """
    import torch

    plain: Callable[[str, Any], None] | None = getattr(torch._C, "_stash_obj_in_tls", None)
    if plain is None or os.environ.get("ACCELERATE_USE_CPU") != "true":
        return
    stash = plain

    def unless_context(key: str, arg: Any) -> None:
        if key != _KEY:
            stash(key, arg)

    torch._C._stash_obj_in_tls = unless_context


def watch_new_groups(note: Callable[[], None]) -> None:
    """Call ``note`` whenever a process group is made: torch forgets one that was destroyed."""
    module: Any = sys.modules.get("torch.distributed.distributed_c10d")
    plain = getattr(module, "_new_process_group_helper", None)
    if plain is None:
        return

    def helper(*args: Any, **kwargs: Any) -> Any:
        note()
        return plain(*args, **kwargs)

    module._new_process_group_helper = helper
