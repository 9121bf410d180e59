"""Which ranks take part in a save, found out without a collective.

A script may save on all ranks, or on the main process alone (``if accelerator.is_main_process:``).
Rank 0 cannot know which before the others come, and a collective that they never join would wait
for ever. So the ranks leave notes in the store of the process group::

    rank r:  here/r ----------------> waits for a plan ---> writes, wrote/n/r -> waits for done/n
    rank 0:  waits a little for here/* ---> plan ---> writes, waits for wrote/n/* ---> done/n

Where the plan does not name a rank, because it came later than rank 0 had patience for, that rank
adds its own files to the checkpoint once that is finished. Plans stay in the store, and rank 0 may
save alone, so a rank that no plan names must find out which plan belongs to the call that it is in:
it compares the folder, the number of collectives so far, and the lines of the script that lead to
the call.

How long rank 0 waits for the first other rank depends on what happened before at the same lines: a
line under ``is_main_process`` costs that wait once, and at a line to which the others came late,
rank 0 waits the next time.

Weights that are spread over the ranks cannot be saved by some of them. There everybody waits for
everybody, and after a while an error names the ranks that are missing.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from notebook_accel.errors import NotebookAccelError
from notebook_accel.launch.rank import current
from notebook_accel.training.notices import notice_once

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from notebook_accel.training.topology import Topology

__all__ = ["Meetings", "Patience", "SavePlan", "describe", "meetings"]


@dataclass(frozen=True)
class Patience:
    """How many seconds ranks wait for each other."""

    first: float = 2.0
    """Of rank 0 for the first other rank, at a line that has not saved before."""
    known: float = 10.0
    """The same, at a line to which the others came the last time."""
    rest: float = 30.0
    """Of rank 0 for the other ranks, once one of them has come."""
    notice: float = 10.0
    """Until a line says who is missing, where all ranks are needed."""
    missing: float = 300.0
    """Until that is an error."""
    rank_0: float = 1800.0
    """Of the others for rank 0, which may do more than they do before it saves."""
    written: float = 3600.0
    """For the files of another rank, however slow its disk may be."""
    other_folder: float = 5.0
    """How long a rank that no plan names looks for a plan that equals its own call in all three:
    folder, lines and number of collectives. After that it takes one that differs in one of them
    (the script names folders by time; ranks save at different lines; a send is counted on one rank
    alone)."""


@dataclass(frozen=True)
class SavePlan:
    """What rank 0 says of one save."""

    number: int
    """Which save of rank 0 it is, from 1 on."""
    call: str
    """What the script called."""
    asked: str
    """The folder as the script gave it to rank 0, or nothing."""
    position: int
    """Collectives that rank 0 had been part of: equal on all ranks at one point of a script."""
    lines: str
    """The lines of the script that led rank 0 there."""
    final: str
    """Where the checkpoint will be."""
    staged: str
    """Where it is written."""
    members: tuple[int, ...]
    """The other ranks that rank 0 waits for."""


@dataclass
class Meetings:
    """The saves of one rank, as it agrees on them with the others.

    Attributes:
        topology: where this rank stands.
        group: the process group in whose store the notes are; None without one.
        patience: how long ranks wait.
    """

    topology: Topology
    group: dist.ProcessGroup | None = None
    patience: Patience = field(default_factory=Patience)
    # Saves that this rank has come to, which tells its notes in here/* apart.
    _num_calls: int = 0
    # The number of the last plan that this rank has made, or taken part in.
    _num_handled: int = 0
    # Of each other rank: the note in here/* with which it took part in an earlier plan.
    _met: dict[int, str] = field(default_factory=dict)
    # By the lines of the script: the last save there, and whether others came to it in time.
    _saved_before: dict[str, tuple[int, bool]] = field(default_factory=dict)

    @property
    def is_lead(self) -> bool:
        """Whether this is rank 0, which decides."""
        return self.topology.process_index == 0

    @property
    def others(self) -> range:
        """All ranks but rank 0."""
        return range(1, self.topology.num_processes)

    def lead(
        self,
        asked: str,
        choose: Callable[[], tuple[str, str]],
        *,
        call: str,
        needs_all: bool = False,
        waits: bool = True,
    ) -> SavePlan:
        """Wait for the other ranks, decide where to write, and tell them; rank 0 calls it.

        Args:
            asked: the folder that the script named, or nothing.
            choose: gives the final and the staging folder.
            call: what the script called, for messages.
            needs_all: whether the save cannot go on without all ranks.
            waits: False goes on alone, whoever may come.

        Raises:
            NotebookAccelError: all ranks are needed, and some did not come.
        """
        members: list[int] = []
        lines = _calling_lines()
        if needs_all:
            members = self._wait_for_all(call)
        elif waits:
            members = self._wait_for_some(call, asked, lines)
        for rank in members:
            self._met[rank] = self._read(f"here/{rank}") or ""
        self._num_handled += 1
        plan = SavePlan(
            number=self._num_handled,
            call=call,
            asked=asked,
            position=_position(),
            lines=lines,
            final=asked,
            staged="",
            members=tuple(members),
        )
        try:
            final, staged = choose()
        except BaseException as error:
            self._announce(plan)
            self.finish(plan, describe(error))
            raise
        plan = replace(plan, final=final, staged=staged)
        self._announce(plan)
        return plan

    def _announce(self, plan: SavePlan) -> None:
        if self.others:
            self._store.set(f"plan/{plan.number}", json.dumps(vars(plan)))

    def follow(self, asked: str, *, call: str) -> SavePlan:
        """Tell rank 0 that this rank is here, and give what rank 0 says; the others call it.

        Raises:
            NotebookAccelError: rank 0 did not come.
        """
        own = self.topology.process_index
        self._num_calls += 1
        self._store.set(f"here/{own}", f"{self._num_calls} {call} {asked}")
        try:
            return self._wait_for_plan(asked, call)
        finally:
            self._store.set(f"here/{own}", "")

    def _wait_for_plan(self, asked: str, call: str) -> SavePlan:
        own, position, lines = self.topology.process_index, _position(), _calling_lines()
        for waited in self._until(self.patience.rank_0):
            for plan in self._new_plans():
                if own in plan.members:
                    self._num_handled = plan.number
                    return plan
                alike = [plan.asked == asked, plan.position == position, plan.lines == lines]
                needed = 2 if waited > self.patience.other_folder else 3
                if plan.call == call and sum(alike) >= needed:
                    self._num_handled = plan.number
                    self._store.set(f"late/{plan.number}", "")
                    return plan
        raise NotebookAccelError(
            f"{call} on rank {own}: rank 0 did not come to it within {self.patience.rank_0:.0f} s. "
            "Rank 0 writes the checkpoint: call it on all ranks, or on the main process alone"
        )

    def _new_plans(self) -> Iterator[SavePlan]:
        number = self._num_handled
        while text := self._read(f"plan/{(number := number + 1)}"):
            fields = json.loads(text)
            yield SavePlan(**{**fields, "members": tuple(fields["members"])})

    def report_written(self, plan: SavePlan, error: str = "", results: Any = None) -> None:
        """Tell rank 0 that this rank has written its part, and what rank 0 needs to know of it; or
        why it could not be written."""
        own = self.topology.process_index
        self._store.set(f"results/{plan.number}/{own}", json.dumps(results))
        self._store.set(f"wrote/{plan.number}/{own}", error)

    def wait_for_members(self, plan: SavePlan) -> list[Any]:
        """Wait until every member has written its part; gives what each has sent with that.

        Raises:
            NotebookAccelError: one of them could not.
        """
        results = []
        for rank in plan.members:
            error = self._wait_for(f"wrote/{plan.number}/{rank}", f"rank {rank}")
            if error:
                raise NotebookAccelError(
                    f"rank {rank} could not write its part of the checkpoint (the last one stays "
                    f"as it is): {error}. Mend that on its machine, and save again"
                )
            # No pickle: torch's store has no secret, and other users of the machine reach it.
            results.append(json.loads(self._store.get(f"results/{plan.number}/{rank}")))
        return results

    def finish(self, plan: SavePlan, error: str = "") -> None:
        """Tell the others that the checkpoint is there, or why not; rank 0 calls it."""
        if self.others:
            self._store.set(f"done/{plan.number}", error)

    def wait_until_done(self, plan: SavePlan) -> None:
        """Wait until rank 0 has finished.

        Raises:
            NotebookAccelError: it could not.
        """
        self._wait_for(f"done/{plan.number}", "rank 0")
        self.raise_failure(plan)

    def raise_failure(self, plan: SavePlan) -> None:
        """Raise what rank 0 failed with, if it has.

        Raises:
            NotebookAccelError: it has.
        """
        error = self._read(f"done/{plan.number}")
        if error:
            raise NotebookAccelError(
                f"rank 0 could not write {plan.final} (the last one stays as it is): {error}. Mend "
                "that on its machine, and save again"
            )

    def _wait_for_some(self, call: str, asked: str, lines: str) -> list[int]:
        """The ranks that take part, where rank 0 could also save alone."""
        if not self.others:
            return []
        first = self.patience.first
        if lines in self._saved_before:
            number, came_in_time = self._saved_before[lines]
            came = came_in_time or self._read(f"late/{number}") is not None
            first = self.patience.known if came else 0.0
        here: list[int] = []
        for waited in self._until(self.patience.rest):
            here = [rank for rank in self.others if self._is_here(rank, call, asked)]
            if len(here) == len(self.others) or (not here and waited >= first):
                break
        self._saved_before[lines] = self._num_handled + 1, bool(here)
        return here

    def _wait_for_all(self, call: str) -> list[int]:
        missing = list(self.others)
        for waited in self._until(self.patience.missing):
            missing = [rank for rank in self.others if not self._is_here(rank, call, None)]
            if not missing:
                return list(self.others)
            if waited > self.patience.notice:
                notice_once("waits to save", f"{call} on rank 0 waits for {_ranks(missing)}")
        raise NotebookAccelError(
            f"{call}: {_ranks(missing)} did not come to it within {self.patience.missing:.0f} s. "
            "The weights are spread over the ranks, so all of them call it: take it out of "
            "`if accelerator.is_main_process:`"
        )

    def _is_here(self, rank: int, call: str, asked: str | None) -> bool:
        """Whether a rank has come anew to such a call, and to this folder where one is given."""
        said = self._read(f"here/{rank}")
        if not said or said == self._met.get(rank):
            return False
        _, its_call, its_folder = said.split(" ", 2)
        return its_call == call and asked in (None, its_folder)

    def _wait_for(self, key: str, who: str) -> str:
        for _ in self._until(self.patience.written):
            said = self._read(key)
            if said is not None:
                return said
        raise NotebookAccelError(
            f"{who} did not finish its part of a save within {self.patience.written:.0f} s"
        )

    def _until(self, limit: float) -> Iterator[float]:
        """Seconds waited so far, again and again until the limit is reached; at least once."""
        # In slices, so that an interrupt is heard; the store's own wait would not hear it.
        began, pause = time.monotonic(), 0.0005
        waited = 0.0
        while True:
            yield waited
            if waited >= limit:
                return
            time.sleep(pause)
            pause = min(pause * 1.5, 0.05)
            waited = time.monotonic() - began

    def _read(self, key: str) -> str | None:
        store = self._store
        return store.get(key).decode() if store.check([key]) else None

    @property
    def _store(self) -> Any:
        default = distributed_c10d._get_default_store()
        return distributed_c10d.PrefixStore("notebook_accel/saves", default)


def meetings(topology: Topology) -> Meetings:
    """Those of this rank: all of its Accelerators count their saves together, as the notes do."""
    shared = current().shared
    found: Meetings | None = shared.get(Meetings)
    group = distributed_c10d._get_default_group() if dist.is_initialized() else None
    if found is None or found.group is not group:
        # A group that was made anew has a store without notes.
        found = shared[Meetings] = Meetings(topology, group)
    return found


def _position() -> int:
    """Collectives so far, where the backend counts them: equal on ranks at the same point."""
    if not dist.is_initialized():
        return 0
    try:
        group: Any = distributed_c10d._get_default_group()
        return int(group._get_sequence_number_for_group())
    except RuntimeError:  # a backend that does not count
        return 0


def _calling_lines() -> str:
    """The lines of the script that lead to a save, the innermost first.

    They are alike on ranks that run the same script, wherever their machines keep it.
    """
    lines = []
    frame: Any = sys._getframe(1)
    while frame is not None:
        if not str(frame.f_globals.get("__name__")).startswith("notebook_accel."):
            lines.append(f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}")
        frame = frame.f_back
    return " ".join(lines)


def describe(error: BaseException) -> str:
    """An error on one line, for the other ranks."""
    return f"{type(error).__name__}: {error}"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
