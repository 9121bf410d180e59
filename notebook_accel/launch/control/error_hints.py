"""What to do about failures that are known: lines which the error of a run adds to the cause.

A hint is a function of the rank at fault; :data:`_HINTS` lists them. Here they go by what the rank
said: where the exception itself is needed, the rank adds the hint to its traceback
(``_shm_hint`` of worker/call.py). What a signal most likely means is in :data:`LIKELY_CAUSES`.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from notebook_accel.launch.control.state import RankState

__all__ = ["LIKELY_CAUSES", "hint_lines"]

# Why a signal ends a process, as the rest of a sentence.
LIKELY_CAUSES = {
    "SIGKILL": "the machine ran out of memory, or somebody killed it",
    "SIGSEGV": "native code (an extension, a driver) accessed memory that is not its own",
    "SIGBUS": "a memory-mapped file was cut short, or /dev/shm is full",
    "SIGABRT": "native code gave up; its last output says why",
    "SIGILL": "a library was built for another processor",
    "SIGFPE": "native code divided by zero",
    "SIGTERM": "somebody asked it to end",
}
# What gloo and torch say of tensors that do not go together.
_MISMATCH = re.compile(r"collective mismatch|data size doesn't match expected size")
# What torch says of other processes where a device has no memory left.
_HOLDS_MEMORY = re.compile(r"\bProcess (\d+) has \S+ \S+ memory in use")


def hint_lines(rank: RankState) -> list[str]:
    """What to do about the failure of this rank, each hint after an empty line."""
    texts = [hint(rank) for hint in _HINTS]
    return [line for text in texts if text for line in ("", text)]


def _mismatch(rank: RankState) -> str:
    """The hint if ranks gave one collective tensors that do not match; "" for other failures."""
    said = rank.failure.text if rank.failure else "\n".join(rank.tail)
    if not _MISMATCH.search(said):
        return ""
    return (
        "Likely, ranks gave one collective tensors of different shapes or types: launch again with "
        "debug=True, which compares what gather, reduce and the like are given, and names the ranks"
    )


def _memory_of_kernel(rank: RankState) -> str:
    """The hint if a device is out of memory of which this kernel holds some; "" for others."""
    own = str(os.getpid())
    if rank.failure is None or own not in _HOLDS_MEMORY.findall(rank.failure.text):
        return ""
    return (
        f"Process {own} is this notebook's own kernel: delete the tensors that it has on the "
        "device and call torch.cuda.empty_cache(), or restart it, then launch again"
    )


_HINTS: tuple[Callable[[RankState], str], ...] = (_mismatch, _memory_of_kernel)
