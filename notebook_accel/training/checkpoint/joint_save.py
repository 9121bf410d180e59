"""One save by all ranks, each of which has a part of a model: rank 0 publishes what all wrote.

They agree on a folder first. Where each rank has whole models, ``rank_zero_save`` takes its place.

::

    rank 0   meet --> make the folder --> write --> wait for all, complete, publish --> say so
    others   meet --> learn of it ------> write --> say what was written ------------> wait for that

A rank that fails leaves a note, which ends the waits of all others.

The ranks leave notes in a key-value store (the process group's, or under torch_xla one of their
own) instead of calling collectives, for two reasons. A save in the background ends in a thread,
whose collectives could mix with those of the training. And if a rank does not come to a save, the
collectives of the others would be matched with whatever the missing rank calls next. Notes are JSON
rather than pickles: torch's store asks for no password, so other users of the machine can write to
it.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from notebook_accel.errors import NotebookAccelError
from notebook_accel.rank.this_rank import current
from notebook_accel.training.checkpoint.folders import Numbering, is_ours
from notebook_accel.training.collectives.exchange import exchange
from notebook_accel.training.files.atomic import StagedFolder
from notebook_accel.training.processes.topology import Topology

# How long a rank waits for another one, which may read or write slowly.
_PATIENCE_SECONDS = 3600.0
# Until a line names the ranks that have not come. Under our launcher the hang sentence does.
_NOTICE_SECONDS = 10.0


class JointSave:
    """One save of all ranks, as a rank takes part: ``meet``, ``open``, ``finish``.

    ``fail`` on an error.
    """

    id: str | None = None
    final: Path
    staged: Path
    folder: StagedFolder | None = None

    def __init__(self, call: str, here: Topology, *, each_machine: bool = False) -> None:
        self._call = call
        self._here = here
        self._own = here.process_index
        self._each_machine = each_machine
        self._heard: NotebookAccelError | None = None  # why another rank could not write
        store = exchange().store()
        # All ranks call it equally often, and a group that is made anew begins at 1.
        number = store.add(f"notebook_accel/saves of rank {self._own}", 1)
        self._store = distributed_c10d.PrefixStore(f"notebook_accel/save {number}", store)

    @property
    def writes(self) -> bool:
        """Whether this rank writes the states that all ranks have."""
        return self.folder is not None

    def meet(self) -> None:
        """Wait for every rank of the save, an hour at most."""
        self._say(f"came/{self._own}")
        came = [f"came/{rank}" for rank in range(self._here.num_processes)]
        is_told = current().launched
        for waited in slices(_PATIENCE_SECONDS):
            if self._store.check(came):
                return
            if waited > _NOTICE_SECONDS and not is_told:
                is_told = True
                is_here = [self._store.check([key]) for key in came]
                missing = [str(rank) for rank, is_in in enumerate(is_here) if not is_in]
                if missing and is_here.index(True) == self._own:  # one rank says it
                    warnings.warn(
                        f"{self._call} waits for rank {', '.join(missing)}: call it on every rank, "
                        "and take it out of `if accelerator.is_main_process:`",
                        stacklevel=2,
                    )
        raise NotebookAccelError(
            f"{self._call}: not every rank came to it within {_PATIENCE_SECONDS:.0f} s. Call it on "
            "all of them"
        )

    def open(self, asked: Path | None, numbers: Numbering) -> None:
        """Agree on the folder (None: a numbered one) of the save; all ranks call it."""
        here = self._here
        leader = self._own - here.local_process_index
        if self._own == 0:
            self.folder = numbers.make() if asked is None else StagedFolder.of(asked)
        elif self._own == leader:
            ((final, staged),) = self._hear("folder/0")
            if not Path(staged).exists() and self._each_machine:
                self.folder = StagedFolder.of(Path(final))
            elif not Path(staged).exists():
                raise unseen(f"{staged}, which rank 0 has made,", f"rank {self._own}")
        if self.folder is not None:
            final, staged = str(self.folder.final), str(self.folder.path)
        if self._own != leader:
            ((final, staged),) = self._hear(f"folder/{leader}")
        else:
            self._say(f"folder/{leader}", [final, staged])
        self.final, self.staged = Path(final), Path(staged)

    def finish(self, results: Any, complete: Callable[[list[Any]], None]) -> None:
        """Wait until the checkpoint is at its final path, or raise if a rank failed.

        All call it.
        """
        if self._own == 0:
            others = [f"wrote/{rank}" for rank in range(1, self._here.num_processes)]
            complete([results, *self._hear(*others)])
            self._publish()
            for key in others:  # of large models they have megabytes
                self._store.delete_key(key)
            self._say("done")
            return
        if self.folder is not None:
            last = self._own + self._here.local_num_processes
            self._hear(*(f"wrote/{rank}" for rank in range(self._own + 1, last)))
            self._publish()
        self._say(f"wrote/{self._own}", results)
        self._hear("done")

    def _publish(self) -> None:
        assert self.folder is not None
        self.folder.publish(is_ours=is_ours)

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this rank could not write, and remove its staged folder."""
        try:
            if error is self._heard:
                return
            with suppress(dist.DistError):  # of a store that went with its rank
                # In this order: a rank that finds its folder gone finds the reason too.
                if self._store.check(["failed"]):
                    raise self._failure_of_another() from error
                self._say("failed", [self._own, describe(error)])
        finally:
            if self.folder is not None:
                self.folder.discard()

    def _say(self, key: str, value: Any = None) -> None:
        self._store.set(key, json.dumps(value))

    def _hear(self, *keys: str) -> list[Any]:
        """Return the other ranks' values; raise if a rank failed or an hour is over."""
        if not keys:
            return []
        for _ in slices(_PATIENCE_SECONDS):
            if self._store.check(["failed"]):
                raise self._failure_of_another()
            if self._store.check([*keys]):
                return [json.loads(self._store.get(key)) for key in keys]
        raise NotebookAccelError(
            f"{self._call}: other ranks did not finish their part of it within "
            f"{_PATIENCE_SECONDS:.0f} s"
        )

    def _failure_of_another(self) -> NotebookAccelError:
        rank, text = json.loads(self._store.get("failed"))
        self._heard = NotebookAccelError(
            f"rank {rank} could not write its part of the checkpoint (the last one stays as it "
            f"is): {text}. Mend that on its machine, and save again"
        )
        return self._heard


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
        f"{what} is not seen on the machine of {where}: save to a disk that all machines share, or "
        "set ProjectConfiguration(save_on_each_node=True), with which each has all of it"
    )
