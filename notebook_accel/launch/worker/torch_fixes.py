"""What of torch has to be mended in a rank."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["mend_backward"]

_KEY = "context"


def mend_backward() -> None:
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
