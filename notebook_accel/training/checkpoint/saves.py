"""Saves of a checkpoint by several ranks, which leave notes in a key-value store.

The store is the process group's, or under torch_xla one of their own. There are two reasons against
collectives. A save in the background ends in a thread, whose collectives could mix with those of
the training. And if a rank does not come to a save, the collectives of the others would be matched
with whatever the missing rank calls next. Notes are JSON rather than pickles: torch's store asks
for no password, so other users of the machine can write to it.
"""

from __future__ import annotations

import contextvars
import copy
import json
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from notebook_accel.errors import NotebookAccelError
from notebook_accel.private import of_torch
from notebook_accel.rank.this_rank import current
from notebook_accel.training.checkpoint import start
from notebook_accel.training.collectives import exchange
from notebook_accel.training.collectives.nested import leaves
from notebook_accel.training.files import atomic
from notebook_accel.training.processes import devices
from notebook_accel.training.processes.topology import Topology
from notebook_accel.training.settings.notices import notice

# How long a rank waits for another one, which may read or write slowly.
_PATIENCE_SECONDS = 3600.0
# Until a line names the ranks that have not come. Under our launcher the hang sentence does.
_NOTICE_SECONDS = 10.0


def meet(call: str, here: Topology) -> None:
    """Wait for every rank, an hour at most, before a ``call`` that all of them make."""
    store = exchange().store()
    # All ranks call it equally often, and a group that is made anew begins at 1.
    number = store.add(f"notebook_accel/meetings of rank {here.process_index}", 1)
    came = [f"notebook_accel/meeting {number} of {rank}" for rank in range(here.num_processes)]
    store.set(came[here.process_index], "")
    is_told = current().launched
    for waited in slices(_PATIENCE_SECONDS):
        if store.check(came):
            return
        if waited > _NOTICE_SECONDS and not is_told:
            is_told = True
            is_here = [store.check([key]) for key in came]
            missing = [str(rank) for rank, is_in in enumerate(is_here) if not is_in]
            if missing and is_here.index(True) == here.process_index:  # one rank says it
                warnings.warn(
                    f"{call} waits for rank {', '.join(missing)}: call it on every rank, and take "
                    "it out of `if accelerator.is_main_process:`",
                    stacklevel=2,
                )
    raise NotebookAccelError(
        f"{call}: not every rank came to it within {_PATIENCE_SECONDS:.0f} s. Call it on all of "
        "them"
    )


def slices(seconds: float) -> Iterator[float]:
    """Yield the seconds waited so far, with a short sleep after each, for so long at most."""
    # In slices, so that an interrupt is heard; the store's own wait would not hear it.
    began, pause = time.monotonic(), 0.0005
    while (waited := time.monotonic() - began) < seconds:
        yield waited
        time.sleep(pause)
        pause = min(pause * 1.5, 0.05)


def describe(error: BaseException) -> str:
    """Return an error as one line of text."""
    return f"{type(error).__name__}: {error}"


def unseen(what: object, where: str) -> NotebookAccelError:
    """Return the error of a machine that lacks a file of another one."""
    return NotebookAccelError(
        f"{what} is not seen on the machine of {where}: save to a disk that all machines share or, "
        "if weights are saved whole, set ProjectConfiguration(save_on_each_node=True), with which "
        "each has all of it"
    )


# How long a rank waits for rank 0 to begin the save: for the number of a checkpoint, and at the
# end. Ranks that run the same code come to it together.
_BEGIN_SECONDS = 10.0
# The final names of the folders of ranks other than the one that publishes.
_OF_RANKS = r"rank_\d+"


class Save:
    """One save of a checkpoint, which rank 0 publishes.

    ::

        rank 0   write -> take the others' files in -> publish -> take in what came meanwhile
        others   write into a folder of their own -> leave a note of it; if published, add the files

    Where each rank has only a part of a model, the save is ``joint``: all ranks :func:`meet` before
    it, rank 0 waits for the notes of all, and the others wait until it has published. A rank that
    fails leaves a note as well, which ends the waits of all others.

    Where each rank has the models whole, no rank waits for another. So rank 0 may save alone, as
    many scripts do, and any rank may be late, or fail. Saves of several ranks belong together if
    they come at the same place in the training and name the same folder. A checkpoint has the ID of
    its save in its files of random states, so that a late rank adds nothing to a folder that
    another save has replaced. For a rank that has come and not written yet, rank 0 publishes an
    empty file. Should that rank be killed before it replaces the file, ``resume_or_start`` takes
    the checkpoint for a damaged one. A rank that gives up takes its note back and then looks
    whether the checkpoint is published; rank 0 publishes and then looks for the note. So one of the
    two removes the empty file.

    With ``each_machine``, the first rank of each machine does there what rank 0 does.

    A rank calls ``open`` and ``finish``; ``fail`` on an error.
    """

    final: Path
    staged: Path
    of_hooks: Path
    """Where hooks of the user's write: in a joint save one folder for all ranks of a disk, so that
    a hook finds there what the one of another rank has written."""
    _folder: atomic.StagedFolder | None = None
    _heard: NotebookAccelError | None = None  # why another rank could not write

    def __init__(
        self, here: Topology, place: str, asked: Path | None, *, each_machine: bool, joint: bool
    ) -> None:
        own = self._own = here.process_index
        machine = own - here.local_process_index
        leader = machine if each_machine else 0
        size = here.local_num_processes if each_machine else here.num_processes
        self.place = place
        self.joint = joint
        self.writes = own == leader
        self._each_machine = each_machine
        self._is_elsewhere = machine != leader
        self._others = [*range(leader + 1, leader + size)] if self.writes else []
        self.id = uuid.uuid4().hex
        store: Any = dist.HashStore()  # type: ignore[attr-defined]
        if here.num_processes > 1:
            store = exchange().store()
            # In a joint save the folder is rank 0's, whatever the others name.
            which = "of all" if joint else f"{place} {asked and asked.name}"
            number = store.add(f"notebook_accel/saves of rank {own} at {which}", 1)
            run = store.compare_set("notebook_accel/saves", "", self.id).decode()
            self.id = f"{run} {which} {number}"
        self._of_rank_0 = distributed_c10d.PrefixStore(f"notebook_accel/{self.id} of 0", store)
        self._store = distributed_c10d.PrefixStore(f"notebook_accel/{self.id} of {leader}", store)
        self._failures = self._of_rank_0 if joint else self._store
        if not self.writes:
            self._store.set(f"here/{own}", "")

    def open(self, asked: Path | None, numbers: start.Numbering) -> None:
        """Make the folder in which this rank writes; None makes a numbered one."""
        if self._own and self.joint:
            self._wait_for(self._of_rank_0, ["began"])
            asked = _final(self._of_rank_0)
        elif self._own and asked is None:
            for _ in slices(_BEGIN_SECONDS):
                if _final(self._of_rank_0):
                    break
            asked = _final(self._of_rank_0) or numbers.folder() / numbers.next()
        if self.writes:
            if asked is None:
                pattern = start.NUMBERED.pattern
                self._folder = atomic.StagedFolder(numbers.folder(), pattern, numbers.next)
            else:
                self._folder = atomic.StagedFolder.of(asked)
            self.final = self._folder.final
            if not self._others:  # the next save of several ranks may never come
                atomic.remove_dead(self.final.parent, _OF_RANKS)
            self._store.set("staged", str(self._folder.path))
            self._store.set("began", str(self.final))
        else:
            assert asked is not None
            name = f"rank_{self._own}"
            self._folder = atomic.StagedFolder(asked.parent, _OF_RANKS, lambda _: name)
            self.final = asked
        self.staged = self.of_hooks = self._folder.path
        if self.joint:
            self._wait_for(self._store, ["began"])
            of_all = Path(self._store.get("staged").decode())
            self.of_hooks = of_all if of_all.exists() else self.staged

    def finish(self, results: Any, complete: Callable[[list[Any]], None]) -> None:
        """Publish the checkpoint, or have this rank's files added to it."""
        assert self._folder is not None
        if not self.writes:
            self._store.set(f"came/{self._own}", json.dumps([str(self.staged), results]))
            if self.joint:
                self._wait_for(self._store, ["done"])
            self.look()
            return
        if self.joint:
            self._wait_for(self._store, [f"came/{rank}" for rank in self._others])
        complete([results, *self._take_in()])
        awaited = [rank for rank in self._others if self._store.check([f"here/{rank}"])]
        for rank in awaited:
            (self.staged / start.random_states_file(rank)).touch()
        # A disk that machines share although each was to write has the checkpoint already.
        if not (
            self._each_machine and atomic.add_entries(self.staged, self.final, self._is_of_this)
        ):
            self._folder.publish(is_ours=start.is_ours)
        self._folder.discard()
        # Who comes from now on sees this, and adds its files itself.
        self._store.set("done", "")
        for _, path, _ in self._came():
            atomic.add_entries(path, self.final, self._is_of_this)
        for rank in awaited:
            if not self._store.check([f"here/{rank}"]):
                atomic.drop_empty(self.final / start.random_states_file(rank), self._is_of_this)

    def _take_in(self) -> list[Any]:
        """Take in the files of ranks that have written; return these ranks' results."""
        taken = []
        for rank, path, results in self._came():
            if not path.exists():
                raise unseen(path, f"rank 0, and rank {rank} has written it")
            atomic.add_entries(path, self.staged, lambda _: True)
            self._store.delete_key(f"came/{rank}")  # of large models they have megabytes
            taken.append(results)
        return taken

    def _came(self) -> Iterator[tuple[int, Path, Any]]:
        """Yield rank, folder and results of each rank that has written."""
        for rank in self._others:
            if self._store.check([f"came/{rank}"]):
                path, results = json.loads(self._store.get(f"came/{rank}"))
                # What is taken in is removed there, and others may write into the store.
                if atomic.is_staged(Path(path), f"rank_{rank}"):
                    yield rank, Path(path), results

    def _wait_for(self, store: Any, keys: list[str]) -> None:
        """Wait for notes of other ranks; raise if a rank failed or an hour is over."""
        for _ in slices(_PATIENCE_SECONDS):
            self._raise_if_another_failed()
            if not keys or store.check(keys):
                return
        raise NotebookAccelError(
            "save_state(): other ranks did not finish their part of it within "
            f"{_PATIENCE_SECONDS:.0f} s"
        )

    def _raise_if_another_failed(self) -> None:
        if self._failures.check(["failed"]):
            self._discard()
            rank, text = json.loads(self._failures.get("failed"))
            self._heard = NotebookAccelError(
                f"rank {rank} could not write its part of the checkpoint (the last one stays as it "
                f"is): {text}. Mend that on its machine, and save again"
            )
            raise self._heard

    def _is_of_this(self, folder: Path) -> bool:
        return start.has_save_id(folder, self.id)

    @property
    def has_begun(self) -> bool:
        """Whether the rank that publishes has come to this save."""
        return _final(self._store) is not None

    def look(self) -> bool:
        """Return whether the save has ended, on a rank that does not publish.

        Add files that came.
        """
        self._raise_if_another_failed()
        self.final = _final(self._store) or self.final
        if not self._store.check(["done"]):
            return False
        if self.staged.exists():
            atomic.add_entries(self.staged, self.final, self._is_of_this)
        self._discard()
        if self._is_elsewhere and not self.final.exists():
            raise unseen(self.final, f"rank {self._own}")
        return True

    def settle(self) -> bool:
        """Wait until the save has ended; return whether it has.

        It gives up if rank 0 does not come to the save.
        """
        try:
            for waited in slices(_PATIENCE_SECONDS):
                if self.look():
                    return True
                if waited > _BEGIN_SECONDS and not self.has_begun:
                    break
            self.give_up()
        except dist.DistError:  # the store went with rank 0, which may have published
            if self.staged.exists():
                atomic.add_entries(self.staged, self.final, self._is_of_this)
            self._discard()
        except KeyboardInterrupt:  # also sent since rank 0 has failed
            with suppress(dist.DistError):
                if not self._store.check(["failed"]):
                    raise
            self._discard()
            raise
        return False

    def give_up(self) -> None:
        """Take this rank back out of the save, and remove what it has written."""
        for note in ("here", "came"):
            self._store.delete_key(f"{note}/{self._own}")
        final = _final(self._store)
        if final is not None and self._store.check(["done"]):
            atomic.drop_empty(final / start.random_states_file(self._own), self._is_of_this)
        self._discard()

    def fail(self, error: BaseException) -> None:
        """Remove what this rank has written; tell the other ranks, if they need what it has."""
        try:
            with suppress(dist.DistError):  # of a store that went with its rank
                if not (self.writes or self.joint):
                    self.give_up()
                elif error is not self._heard:
                    if self.joint:
                        self._raise_if_another_failed()
                    # In this order: a rank that finds its folder gone finds the reason too.
                    self._failures.set("failed", json.dumps([self._own, describe(error)]))
        finally:
            self._discard()

    def _discard(self) -> None:
        if self._folder is not None:
            self._folder.discard()


def _final(store: Any) -> Path | None:
    """Return the final path that the rank has chosen that publishes, once it has."""
    return Path(store.get("began").decode()) if store.check(["began"]) else None


def in_background(
    save: Save, finish: Callable[[], None], device: torch.device
) -> futures.Future[None]:
    """Start a thread of this rank that writes and publishes a checkpoint.

    ::

        rank             copies its pieces to the host          next step, next step, ...
        a thread of it    '--> writes the copies, waits for the other ranks, publishes
    """

    def run() -> None:
        try:
            try:
                # A new thread's current device is number 0.
                if device.index is not None and devices.driver(device.type) is None:
                    torch.accelerator.set_device_index(device.index)
                finish()
            except BaseException as error:
                save.fail(error)
                raise
        except BaseException as error:
            notice(f"{save.final} could not be written: {describe(error)}")
            raise

    # A script that ends without waiting ends once its last checkpoint is in its place: Python joins
    # the thread.
    thread = futures.ThreadPoolExecutor(1, "notebook_accel save")
    written = thread.submit(contextvars.copy_context().run, run)
    thread.shutdown(wait=False)
    return written


def host_copies(state: Any) -> Any:
    """Return a copy of nested ``state`` on the host; tensors that shared memory share it there.

    Where there is an accelerator, its memory is pinned; torch keeps that for the next copy.
    """
    pins = torch.accelerator.is_available()
    storages: dict[tuple[torch.device, int], torch.UntypedStorage] = {}

    loaded = sys.modules.get("torch.distributed.tensor")
    known: dict[int, Any] = {}
    # Not by a function that calls itself: a cycle, it would keep the copies until it is collected.
    for tensor in [leaf for leaf in leaves(state) if isinstance(leaf, torch.Tensor)]:
        is_part = loaded is not None and isinstance(tensor, loaded.DTensor)
        local = (tensor.to_local() if is_part else tensor).detach()  # type: ignore[attr-defined]
        source = local.untyped_storage()
        key = local.device, source.data_ptr()
        if key not in storages:
            room = torch.empty(source.nbytes(), dtype=torch.uint8, device="cpu", pin_memory=pins)
            storages[key] = room.untyped_storage()
            storages[key].copy_(source, non_blocking=True)
        new = torch.empty(0, dtype=local.dtype, device="cpu")
        new.set_(storages[key], local.storage_offset(), local.shape, local.stride())
        # Not from_local: it would put the part back on the mesh's device.
        known[id(tensor)] = of_torch.at_other_device(tensor, new) if is_part else new
    if known and pins:
        torch.accelerator.synchronize()
    return copy.deepcopy(state, known)
