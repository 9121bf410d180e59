"""What came of a run: its status and its error, from its final state.

Pure. Arrival order is not cause: a rank that died by a signal or exit code comes before one that
raised, and that before one that only lost its connection to another.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from notebook_accel.launch.system.processes import signal_name

if TYPE_CHECKING:
    from notebook_accel.launch.control.state import RankState, RunState

__all__ = ["Failure", "Verdict", "judge"]

_NUM_LAST_LINES = 10

_LIKELY = {
    "SIGKILL": "the machine ran out of memory, or somebody killed it",
    "SIGSEGV": "native code (an extension, a driver) accessed memory that is not its own",
    "SIGBUS": "a memory-mapped file was cut short, or /dev/shm is full",
    "SIGABRT": "native code gave up; its last output says why",
    "SIGILL": "a library was built for another processor",
    "SIGFPE": "native code divided by zero",
    "SIGTERM": "somebody asked it to end",
}
# NCCL's watchdog aborts a rank that lost another: a consequence, not a cause.
_WATCHDOG = re.compile(r"ProcessGroupNCCL.*(watchdog|aborting)|NCCL watchdog", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What a ``WorkerError`` says."""

    message: str
    rank: int | None
    ranks: tuple[int, ...]
    traceback: str = ""
    exitcode: int | None = None
    signal: str | None = None
    pickled: bytes | None = None


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The final status, and the failure where it is "failed"."""

    status: str
    failure: Failure | None = None


def judge(
    state: RunState, *, stopped_at: float | None, firm: bool, lost_agent: str | None, log_dir: str
) -> Verdict:
    """The verdict on a run that has ended.

    Args:
        state: the last state.
        stopped_at: wall time at which somebody asked for the end, None where nobody did.
        firm: whether ranks were interrupted, terminated or killed for it.
        lost_agent: how the agent died, None where it did not.
        log_dir: where the ranks' whole output is.
    """
    failed = [rank for rank in state.ranks if _has_failed(rank, stopped_at, firm)]
    if failed:
        returned = [rank.rank for rank in state.ranks if rank.returned]
        return Verdict(status="failed", failure=_rank_failure(failed, returned, log_dir))
    lost = tuple(rank.rank for rank in state.ranks if not rank.returned)
    if lost_agent is not None and stopped_at is None and lost:
        return Verdict(status="failed", failure=_agent_failure(lost, lost_agent))
    if stopped_at is not None:
        return Verdict(status="stopped")
    return Verdict(status="succeeded")


def _has_failed(rank: RankState, stopped_at: float | None, firm: bool) -> bool:
    if rank.returned or (rank.ended_by_us and rank.failure is None):
        return False
    if stopped_at is None:
        return True
    if rank.failure is not None and rank.failure.kind in ("stopped", "interrupted"):
        return False
    # An interrupt makes all sorts of errors; only those from before it are the run's own.
    when = rank.failure.wall if rank.failure is not None else rank.ended or 0.0
    return when < stopped_at or not firm


def _order(rank: RankState) -> tuple[int, float]:
    failure = rank.failure
    if failure is None:
        return (2 if _is_watchdog(rank) else 0), rank.ended or 0.0
    kinds = {"exit": 0, "lost peer": 2}
    return kinds.get(failure.kind, 1), failure.wall


def _is_watchdog(rank: RankState) -> bool:
    return rank.signal == 6 and bool(_WATCHDOG.search("\n".join(rank.tail)))


def _rank_failure(failed: list[RankState], returned: list[int], log_dir: str) -> Failure:
    failed = sorted(failed, key=lambda rank: (_order(rank)[0], _order(rank)[1], rank.rank))
    cause = failed[0]
    own = [rank for rank in failed if _order(rank)[0] < 2] or [cause]
    how = cause.failure
    return Failure(
        message="\n".join(
            [
                *_describe(cause),
                *_also(own, cause),
                *_left_alone(cause, returned),
                *_where(cause, log_dir),
            ]
        ),
        rank=cause.rank,
        ranks=tuple(sorted(rank.rank for rank in own)),
        traceback=how.traceback if how else "",
        exitcode=how.exitcode if how else cause.exitcode,
        signal=signal_name(cause.signal) if cause.signal and not how else None,
        pickled=how.pickled if how else None,
    )


def _describe(rank: RankState) -> list[str]:
    how = rank.failure
    if how is None:
        return [_death(rank), *_last_lines(rank)]
    if how.kind == "exit":
        return [
            f"rank {rank.rank} ended with exit code {how.exitcode} (sys.exit)",
            *_last_lines(rank),
        ]
    return [
        f"rank {rank.rank} failed: {_headline(how.type_name, how.text)}",
        "",
        how.traceback.rstrip(),
    ]


def _death(rank: RankState) -> str:
    if rank.signal is None:
        return (
            f"rank {rank.rank} ended with exit code {rank.exitcode}, without an exception "
            "(os._exit, or native code that ended the process)"
        )
    name = signal_name(rank.signal)
    likely = _LIKELY.get(name)
    return f"rank {rank.rank} was killed by {name}" + (f": likely, {likely}" if likely else "")


def _headline(type_name: str, text: str) -> str:
    first = text.strip().split("\n", 1)[0]
    return f"{type_name}: {first}" if first else type_name


def _last_lines(rank: RankState) -> list[str]:
    if not rank.tail:
        return [f"rank {rank.rank} printed nothing"]
    lines = rank.tail[-_NUM_LAST_LINES:]
    return [f"last lines of rank {rank.rank}:", *(f"    {line}" for line in lines)]


def _also(failed: list[RankState], cause: RankState) -> list[str]:
    """One line for each way in which other ranks failed; ranks that failed alike share one."""
    alike: dict[str, list[int]] = defaultdict(list)
    for rank in failed:
        if rank is not cause:
            alike[_in_one_line(rank)].append(rank.rank)
    same = alike.pop(_in_one_line(cause), [])
    lines = [f"{_names(same)} failed in the same way"] if same else []
    lines += [f"{_names(ranks)}: {how}" for how, ranks in alike.items()]
    return ["", *lines] if lines else []


def _in_one_line(rank: RankState) -> str:
    how = rank.failure
    if how is not None:
        return _headline(how.type_name, how.text)
    if rank.signal is not None:
        return f"killed by {signal_name(rank.signal)}"
    return f"exit code {rank.exitcode}"


def _left_alone(cause: RankState, returned: list[int]) -> list[str]:
    """Why a rank lost its peers, where they did not fail: they had returned."""
    if _order(cause)[0] < 2 or not returned:
        return []
    verb = "has" if len(returned) == 1 else "have"
    told = (
        f"{_names(returned)} {verb} returned already, while rank {cause.rank} still waited for "
        "all: every rank must make the same collective calls (wait_for_everyone, gather, backward)"
    )
    return ["", told]


def _where(rank: RankState, log_dir: str) -> list[str]:
    # A launch that raised gave nobody its handle.
    logs = f"notebook_accel.runs()[-1].logs({rank.rank})"
    return ["", f"The whole output of rank {rank.rank}: {logs}, kept in {log_dir}"]


def _agent_failure(lost: tuple[int, ...], how: str) -> Failure:
    return Failure(
        message=(
            f"the process that watches the ranks {how}, so that {_names(lost)} ended without a "
            "result. Likely, the machine ran out of memory or somebody killed it; launch again."
        ),
        rank=None,
        ranks=lost,
    )


def _names(ranks: list[int] | tuple[int, ...]) -> str:
    """ "rank 3", "ranks 0-2 and 5"."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in spans]
    listed = (
        ", ".join(texts[:-1]) + (" and " if len(texts) > 1 else "") + texts[-1] if texts else ""
    )
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"
