"""Calls methods around the steps of all optimizers of torch, as long as their objects live.

A step is a loop over a dictionary of hooks. A hook that was removed with its owner, by the garbage
collector amid a step, would break that loop. So the hooks here stay for good.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from weakref import WeakMethod

from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

Method = Callable[[Optimizer], None]

# Ranks may be threads, each with methods of its own.
_lock = threading.Lock()
_before: tuple[WeakMethod[Method], ...] = ()
_after: tuple[WeakMethod[Method], ...] = ()


def call_around_steps(*, before: Method | None = None, after: Method | None = None) -> None:
    """Have bound methods called before and after each step of any optimizer."""
    global _before, _after
    with _lock:
        _hook_in()
        _before, _after = _with(_before, before), _with(_after, after)


@functools.cache
def _hook_in() -> None:
    def call(methods: tuple[WeakMethod[Method], ...], optimizer: Optimizer) -> None:
        for known in methods:
            if (method := known()) is not None:
                method(optimizer)

    register_optimizer_step_pre_hook(lambda optimizer, *_: call(_before, optimizer))
    register_optimizer_step_post_hook(lambda optimizer, *_: call(_after, optimizer))


def _with(
    methods: tuple[WeakMethod[Method], ...], new: Method | None
) -> tuple[WeakMethod[Method], ...]:
    living = [one for one in methods if one() is not None]
    return (*living, *([] if new is None else [WeakMethod(new)]))
