"""One save that rank 0 writes and publishes, and in which no rank waits for another.

::

    rank 0   write --> take the others' files in --> publish --> take in what came meanwhile
    others   write into a folder of their own --> leave a note of it; if published, add the files

So rank 0 may save alone, as many scripts do, and any rank may be late, or fail. The notes are in a
key-value store, like those of ``joint_save``. Saves of several ranks belong together if they come
at the same place in the training and name the same folder. A checkpoint has the ID of its save in
its files of random states, so that a late rank adds nothing to a folder that another save has
replaced.

For a rank that has come and not written yet, rank 0 publishes an empty file. Should that rank be
killed before it replaces the file, ``resume_or_start`` takes the checkpoint for a damaged one. A
rank that gives up takes its note back and then looks whether the checkpoint is published; rank 0
publishes and then looks for the note. So one of the two removes the empty file.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from notebook_accel.errors import NotebookAccelError
from notebook_accel.training.checkpoint.folders import Numbering, is_ours
from notebook_accel.training.checkpoint.joint_save import describe, slices, unseen
from notebook_accel.training.checkpoint.start import has_save_id, random_states_file
from notebook_accel.training.collectives.exchange import exchange
from notebook_accel.training.files.atomic import StagedFolder, add_entries, drop_empty, is_staged
from notebook_accel.training.processes.topology import Topology

# How long a rank waits for rank 0 to begin the save: for the number of a checkpoint, and at the
# end. Ranks that run the same code come to it together.
_BEGIN_SECONDS = 10.0
# How long it waits, at the end, for what rank 0 has begun.
_PATIENCE_SECONDS = 3600.0


class RankZeroSave:
    """One checkpoint save, as one rank takes part in it; called as a ``JointSave`` is.

    With ``each_machine``, the first rank of each machine does there what rank 0 does.
    """

    final: Path
    staged: Path
    _folder: StagedFolder

    def __init__(
        self, here: Topology, place: str, asked: Path | None, *, each_machine: bool
    ) -> None:
        own = self._own = here.process_index
        machine = own - here.local_process_index
        leader = machine if each_machine else 0
        size = here.local_num_processes if each_machine else here.num_processes
        self.place = place
        self.writes = own == leader
        self._each_machine = each_machine
        self._is_elsewhere = machine != leader
        self._others = [*range(leader + 1, leader + size)] if self.writes else []
        self.id = uuid.uuid4().hex
        store: Any = dist.HashStore()  # type: ignore[attr-defined]
        if here.num_processes > 1:
            store = exchange().store()
            which = f"{place} {asked and asked.name}"
            number = store.add(f"notebook_accel/saves of rank {own} at {which}", 1)
            run = store.compare_set("notebook_accel/saves", "", self.id).decode()
            self.id = f"{run} {which} {number}"
        self._of_rank_0 = distributed_c10d.PrefixStore(f"notebook_accel/{self.id} of 0", store)
        self._store = distributed_c10d.PrefixStore(f"notebook_accel/{self.id} of {leader}", store)
        if not self.writes:
            self._store.set(f"here/{own}", "")

    def open(self, asked: Path | None, numbers: Numbering) -> None:
        """Make the folder in which this rank writes; None makes a numbered one."""
        if asked is None and self._own:
            for _ in slices(_BEGIN_SECONDS):
                if _final(self._of_rank_0):
                    break
            asked = _final(self._of_rank_0) or numbers.folder() / numbers.next()
        if self.writes:
            self._folder = numbers.make() if asked is None else StagedFolder.of(asked)
            self.final = self._folder.final
            self._store.set("began", str(self.final))
        else:
            assert asked is not None
            name = f"rank_{self._own}"
            self._folder = StagedFolder(asked.parent, r"rank_\d+", lambda _: name)
            self.final = asked
        self.staged = self._folder.path

    def finish(self, results: Any, complete: Callable[[list[Any]], None]) -> None:
        """Publish the checkpoint, or have this rank's files added to it."""
        if not self.writes:
            self._store.set(f"came/{self._own}", str(self.staged))
            self.look()
            return
        complete([results])
        for rank, path in self._came():
            if not path.exists():
                raise unseen(path, f"rank 0, and rank {rank} has written it")
            add_entries(path, self.staged, lambda _: True)
        awaited = [rank for rank in self._others if self._store.check([f"here/{rank}"])]
        for rank in awaited:
            (self.staged / random_states_file(rank)).touch()
        # A disk that machines share although each was to write has the checkpoint already.
        if not (self._each_machine and add_entries(self.staged, self.final, self._is_of_this)):
            self._folder.publish(is_ours=is_ours)
        self._folder.discard()
        # Who comes from now on sees this, and adds its files itself.
        self._store.set("done", "")
        for _, path in self._came():
            add_entries(path, self.final, self._is_of_this)
        for rank in awaited:
            if not self._store.check([f"here/{rank}"]):
                drop_empty(self.final / random_states_file(rank), self._is_of_this)

    def _came(self) -> Iterator[tuple[int, Path]]:
        """Yield rank and folder of each rank that has written."""
        for rank in self._others:
            if self._store.check([f"came/{rank}"]):
                path = Path(self._store.get(f"came/{rank}").decode())
                # What is taken in is removed there, and others may write into the store.
                if is_staged(path, f"rank_{rank}"):
                    yield rank, path

    def _is_of_this(self, folder: Path) -> bool:
        return has_save_id(folder, self.id)

    @property
    def has_begun(self) -> bool:
        """Whether the rank that publishes has come to this save."""
        return _final(self._store) is not None

    def look(self) -> bool:
        """Return whether the save has ended, on a rank that does not publish.

        Add files that came.
        """
        if self._store.check(["failed"]):
            self._folder.discard()
            raise NotebookAccelError(
                "rank 0 could not write the checkpoint (the last one stays as it is): "
                + self._store.get("failed").decode()
            )
        self.final = _final(self._store) or self.final
        if not self._store.check(["done"]):
            return False
        if self.staged.exists():
            add_entries(self.staged, self.final, self._is_of_this)
        self._folder.discard()
        if self._is_elsewhere and not self.final.exists():
            raise unseen(self.final, f"rank {self._own}")
        return True

    def settle(self) -> bool:
        """Wait until the save has ended; return whether it has.

        It gives up if rank 0 does not come to the save.
        """
        with suppress(dist.DistError):  # of a store that went with rank 0
            try:
                for waited in slices(_PATIENCE_SECONDS):
                    if self.look():
                        return True
                    if waited > _BEGIN_SECONDS and not self.has_begun:
                        break
            except KeyboardInterrupt:  # also sent since rank 0 has failed
                if self._store.check(["failed"]):
                    self._discard()
                raise
            self.give_up()
        return False

    def give_up(self) -> None:
        """Take this rank back out of the save, and remove what it has written."""
        for note in ("here", "came"):
            self._store.delete_key(f"{note}/{self._own}")
        final = _final(self._store)
        if final is not None and self._store.check(["done"]):
            drop_empty(final / random_states_file(self._own), self._is_of_this)
        self._discard()

    def fail(self, error: BaseException) -> None:
        """Remove what this rank has written; if it was to publish, the other ranks are told."""
        with suppress(dist.DistError):
            if self.writes:
                self._store.set("failed", describe(error))
            else:
                self.give_up()
        self._discard()

    def _discard(self) -> None:
        if hasattr(self, "_folder"):
            self._folder.discard()


def _final(store: Any) -> Path | None:
    """Return the final path that the rank has chosen that publishes, once it has."""
    return Path(store.get("began").decode()) if store.check(["began"]) else None
