"""Decide how a run ended: its status and its error, from the states of all ranks.

    a rank raises or dies -> its agent ends the others (agent/ending.py) and sends Raised, RankEnded
                          -> RankState of each rank (run_state.py) -> judge -> Failure
                          -> WorkerError (run.py)

The failure that is reported first need not be the cause: if one rank fails, the others fail a
moment later since they lost their connection to it, and the messages may arrive in any order. So
failures are ordered by kind, then by time:

    death by a signal or exit code  <  an exception  <  a connection to another rank that was lost

The first in this order is the cause: the error shows its traceback, and mentions the others in one
line each. A lost agent (the helper process that watches the ranks of one machine) comes before the
lost connections that follow from it. Failures on one machine are ordered by its clock. Of failures
on two machines, whose clocks may differ, the one that the kernel heard of first comes first.
The functions here are pure, except that one reads the pid of this process.
"""

from __future__ import annotations

import os
import re
import signal
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from notebook_accel.launch.control.hang import place_of_wait
from notebook_accel.launch.control.pool import AgentEnd
from notebook_accel.launch.control.run_state import Failure, RankState, RunState
from notebook_accel.launch.control.stacks import fold_frames
from notebook_accel.launch.text.terminal_text import one_line, plain_text
from notebook_accel.launch.text.wording import rank_list
from notebook_accel.system.processes import describe_exit, signal_name

# ---- what to do about failures that are known: lines which the error adds to the cause ------


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
    """Return advice on a rank's failure as lines of the error message; [] if none fits."""
    said = rank.failure.text if rank.failure else "\n".join(rank.tail)
    hints, own = [], str(os.getpid())
    if _MISMATCH.search(said):
        hints.append(
            "Likely, ranks gave one collective tensors of different shapes or types: launch again "
            "with debug=True, which compares what gather, reduce and the like are given, and names "
            "the ranks"
        )
    if rank.failure is not None and own in _HOLDS_MEMORY.findall(said):
        hints.append(
            f"Process {own} is this notebook's own kernel: delete the tensors that it has on the "
            "device and call torch.cuda.empty_cache(), or restart it, then launch again"
        )
    return [line for text in hints for line in ("", text)]


# Lines of output that the error shows of a rank that died without an exception.
_NUM_LAST_LINES = 10
_SAME_CALLS = "every rank must make the same collective calls (wait_for_everyone, gather, backward)"
# Characters of what the backend says of a connection that ended.
_MAX_OF_BACKEND = 160

# The watchdog of NCCL and its kin ends a rank that lost another: a consequence, not a cause.
_WATCHDOG = re.compile(r"ProcessGroup\w+.*(watchdog|aborting)|\w+ watchdog", re.IGNORECASE)
# What it says of a collective that took longer than the group's timeout; releases of torch differ
# in what stands around it.
_TIMEOUT = re.compile(
    r"Work\w+\(SeqNum=(?P<number>\d+), OpType=_?(?P<kind>\w+)[^\n]*?\) ran for (?P<ms>\d+) millisec"
)


class _Kind(IntEnum):
    """How a rank failed. A rank with a smaller kind more likely caused the other failures.

    DEATH: a signal or an exit code ended its process. EXCEPTION: its function raised. LOST_PEER:
    it lost its connection to another rank, as happens when that rank fails.
    """

    DEATH = 0
    EXCEPTION = 1
    LOST_PEER = 2


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The outcome of a run."""

    status: str
    failure: Failure | None = None


def judge(state: RunState, *, is_stopped: bool, lost: Sequence[AgentEnd], log_dir: str) -> Verdict:
    """Return the outcome of a run whose ranks have all ended."""
    failed = [rank for rank in state.ranks if _has_failed(rank, is_stopped=is_stopped)]
    # A "lost peer" error is no cause if the peer's agent is lost, or if the peer was told to leave
    # or killed: agents end ranks one by one, so that one may lose the other.
    has_left = is_stopped and any(
        _left_as_asked(rank) or rank.ended_by_agent for rank in state.ranks
    )
    if failed and not ((lost or has_left) and min(map(_kind, failed)) == _Kind.LOST_PEER):
        return Verdict(status="failed", failure=_rank_failure(failed, state, log_dir))
    without_result = tuple(rank.rank for rank in state.ranks if not rank.returned)
    if lost and not is_stopped and without_result:
        return Verdict(status="failed", failure=_agent_failure(lost[0], without_result))
    # A rank that has no result, and did not fail, was ended by us.
    return Verdict(status="stopped" if is_stopped or without_result else "succeeded")


def _has_failed(rank: RankState, *, is_stopped: bool) -> bool:
    if rank.returned or (rank.ended_by_agent and rank.failure is None):
        return False
    if not is_stopped:
        return True
    if _left_as_asked(rank):
        return False
    # An interrupt makes all sorts of errors; only those from before it are the run's own.
    return not rank.after_interrupt


def _left_as_asked(rank: RankState) -> bool:
    return rank.failure is not None and rank.failure.kind in ("stopped", "interrupted")


def _kind(rank: RankState) -> _Kind:
    failure = rank.failure
    if failure is None:
        return _Kind.LOST_PEER if _is_watchdog(rank) else _Kind.DEATH
    return {"exit": _Kind.DEATH, "lost peer": _Kind.LOST_PEER}.get(failure.kind, _Kind.EXCEPTION)


def _in_order(failed: list[RankState]) -> list[RankState]:
    """Return the ranks that failed, the likeliest cause first."""
    # For each kind of failure and each agent: the `end_order` of the first rank that failed so.
    first: dict[tuple[_Kind, int], int] = {}
    for rank in failed:
        key = _kind(rank), rank.agent
        first[key] = min(rank.end_order, first.get(key, rank.end_order))

    def order(rank: RankState) -> tuple[_Kind, int, float, int]:
        when = rank.failure.wall if rank.failure is not None else rank.ended or 0.0
        return _kind(rank), first[_kind(rank), rank.agent], when, rank.rank

    return sorted(failed, key=order)


def _is_watchdog(rank: RankState) -> bool:
    return rank.signal == signal.SIGABRT and bool(_WATCHDOG.search("\n".join(rank.tail)))


def _rank_failure(failed: list[RankState], state: RunState, log_dir: str) -> Failure:
    failed = _in_order(failed)
    cause = failed[0]
    # Ranks that only lost their connection to a peer say nothing of their own.
    culprits = [rank for rank in failed if _kind(rank) != _Kind.LOST_PEER] or [cause]
    raised = cause.failure
    lines = [
        *(_describe_timeout(cause, state) or _describe_lost(cause, state) or _describe(cause)),
        *hint_lines(cause),
        *_other_failures(culprits, cause),
    ]
    if cause.tail or (raised and raised.kind != "exit"):
        lines += ["", f"The whole output of rank {cause.rank} is kept in {log_dir}"]
    return Failure(
        # What a function raised or printed may clear the person's terminal.
        message=plain_text("\n".join(lines)),
        rank=cause.rank,
        ranks=tuple(sorted(rank.rank for rank in culprits)),
        traceback=plain_text(raised.traceback) if raised else "",
        exitcode=raised.exitcode if raised else cause.exitcode,
        signal=signal_name(cause.signal) if cause.signal and not raised else None,
    )


def _describe(rank: RankState) -> list[str]:
    raised = rank.failure
    if raised is None:
        crash = ["it crashed here, the newest call first:", rank.crash] if rank.crash else []
        how = f"rank {rank.rank} {describe_exit(rank.exitcode, rank.signal)}"
        if rank.signal is None:
            how += ", without an exception (os._exit, or native code that ended the process)"
        elif likely := LIKELY_CAUSES.get(signal_name(rank.signal)):
            how += f": likely, {likely}"
        return [how, *crash, *_last_lines(rank)]
    if raised.kind == "exit":
        ended = f"rank {rank.rank} ended with exit code {raised.exitcode} (sys.exit)"
        return [ended, *_last_lines(rank)]
    traceback = fold_frames(raised.traceback).rstrip()
    return [
        f"rank {rank.rank} failed: {_in_one_line(rank)}",
        *(["", traceback] if traceback else []),
    ]


def _last_lines(rank: RankState) -> list[str]:
    if not rank.tail:
        return [f"rank {rank.rank} printed nothing"]
    lines = rank.tail[-_NUM_LAST_LINES:]
    return [f"last lines of rank {rank.rank}:", *(f"    {line}" for line in lines)]


def _in_one_line(rank: RankState) -> str:
    """Return how a rank failed, in a few words."""
    raised = rank.failure
    if raised is not None:
        first_line = raised.text.strip().split("\n", 1)[0]
        return f"{raised.type_name}: {first_line}" if first_line else raised.type_name
    if rank.signal is not None:
        return f"killed by {signal_name(rank.signal)}"
    return f"exit code {rank.exitcode}"


def _other_failures(failed: list[RankState], cause: RankState) -> list[str]:
    """Return lines about the failed ranks other than ``cause``, one line per distinct error."""
    alike: dict[str, list[int]] = defaultdict(list)
    for rank in failed:
        if rank is not cause:
            alike[_in_one_line(rank)].append(rank.rank)
    as_the_cause = alike.pop(_in_one_line(cause), [])
    lines = [f"{rank_list(as_the_cause)} failed in the same way"] if as_the_cause else []
    lines += [f"{rank_list(ranks)}: {how}" for how, ranks in alike.items()]
    return ["", *lines] if lines else []


def _describe_timeout(cause: RankState, state: RunState) -> list[str]:
    """Return who waited where, the odd one out first, if a watchdog ended ``cause``; else []."""
    waited: dict[tuple[bool, str], list[int]] = defaultdict(list)
    for rank in state.ranks if _is_watchdog(cause) else ():
        found = _TIMEOUT.search("\n".join(rank.tail))
        if found is not None:
            seconds = f"{int(found['ms']) / 1000:.0f} s"
            text = f"waited {seconds} in {found['kind'].lower()}, collective {found['number']}"
        else:
            place = state.hang.elsewhere.get(rank.rank, "") if state.hang else ""
            text = "had returned" if rank.returned else f"waited in none{place and f', {place}'}"
        waited[found is not None, text].append(rank.rank)
    if not any(has_waited for has_waited, _ in waited):
        return []
    # Who did not wait is held to be at fault, else those that are the fewest.
    ordered = sorted(waited.items(), key=lambda item: (item[0][0], len(item[1]), item[1]))
    who = "; ".join(f"{rank_list(ranks)} {text}" for (_, text), ranks in ordered)
    before = f"Before that: {state.hang.text}" if state.hang else f"There, {_SAME_CALLS}"
    return [f"a collective took longer than the timeout of its process group: {who}", "", before]


def _describe_lost(cause: RankState, state: RunState) -> list[str]:
    """Return lines that explain a lost connection between ranks; [] for other kinds of failure.

    The message of gloo or NCCL names only an address, and guesses that a rank crashed. Often a rank
    has only returned earlier than the others. Also [] if nothing beyond that message is known.
    """
    returned = [rank.rank for rank in state.ranks if rank.returned]
    if cause.failure is None or _kind(cause) != _Kind.LOST_PEER:
        return []
    place = place_of_wait(cause.failure.traceback)
    if not returned and not place:
        return []
    waits = f"rank {cause.rank} still waits {place or 'for the others'}"
    if returned:
        verb = "has" if len(returned) == 1 else "have"
        what = f"{rank_list(returned)} {verb} returned already, while {waits}"
    else:
        what = f"another rank has left the process group, while {waits}"
    backend = f"The backend says: {one_line(_in_one_line(cause), _MAX_OF_BACKEND)}"
    return [f"{what}: {_SAME_CALLS}", "", backend]


def _agent_failure(lost: AgentEnd, without_result: tuple[int, ...]) -> Failure:
    advice = f"Likely, {lost.likely or LIKELY_CAUSES['SIGKILL']}; launch again."
    if lost.traceback:
        own_error = f"Its own error:\n\n{lost.traceback.rstrip()}"
        advice = f"Launch again; if it happens again, this says why. {own_error}"
    return Failure(
        message=(
            f"the helper process that watches {rank_list(lost.ranks)} {lost.how}, so that "
            f"{rank_list(without_result)} ended without a result. {advice}"
        ),
        rank=None,
        ranks=without_result,
        traceback=lost.traceback,
    )


# ---- Advice at the end of a run whose function seems to have forgotten something, and raised
# nothing.


def closing_advice(last: RunState, models: Sequence[str], *, uses_torch: bool) -> list[str]:
    """Return a line for each likely mistake in a run; [] if a rank did not return.

    Args:
        models: names of the notebook's models that the function uses.
    """
    lines = []
    has_group = any(rank.made_group for rank in last.ranks)
    has_succeeded = all(rank.returned for rank in last.ranks)
    if models and has_succeeded and all(rank.returned_none for rank in last.ranks):
        names = ", ".join(f"`{name}`" for name in models)
        lines.append(
            f"{last.name} used {names} of the notebook and returned None: the notebook's own stays "
            "as it was; return what you want to keep"
        )
    # A function without torch trains nothing: copies that run on their own are what it wants.
    if uses_torch and last.world_size > 1 and has_succeeded and not has_group:
        lines.append(
            f"no rank made a process group: {last.world_size} copies of {last.name} ran on their "
            "own (make an Accelerator in it, or call torch.distributed.init_process_group)"
        )
    return lines
