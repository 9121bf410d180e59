"""Processes that a rank forks after a tokenizer has used its threads: a loader's workers, mostly.

Threads do not come along by fork. The tokenizers library does without them in such a process, and
its versions before 0.23 print five lines about it, in each. The variable by which a user decides
this keeps them silent, so it is set for the moment of the fork: what is forked has no threads, and
the rank keeps those that it has.
"""

from __future__ import annotations

import os
from typing import Any

from notebook_accel.launch.worker.after_import import change_module

__all__ = ["install"]

_VARIABLE = "TOKENIZERS_PARALLELISM"


def install() -> None:
    """Let what this rank forks do without the threads of its tokenizers, and say nothing."""
    change_module("tokenizers", _watch_forks)


def _watch_forks(_: Any) -> None:
    is_ours = False

    def before() -> None:
        nonlocal is_ours
        is_ours = _VARIABLE not in os.environ
        os.environ.setdefault(_VARIABLE, "false")

    def after() -> None:
        if is_ours:
            os.environ.pop(_VARIABLE, None)

    os.register_at_fork(before=before, after_in_parent=after)
