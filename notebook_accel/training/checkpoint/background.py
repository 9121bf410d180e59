"""Writing a checkpoint while the training goes on.

::

    rank             fork                                    next step, next step, ...
                      |--> child: writes its pieces, ends
    a thread of it    '--> waits for the child, tells the other ranks, publishes

The child has the rank's memory as it was at the fork, for the price of copying page tables: some
hundredths of the time that writing takes. What the training changes meanwhile, the system copies
page by page. Nobody but the child holds those pages; they are gone when it ends, and it ends with
its rank. It computes nothing, since threads do not survive a fork: it only writes, as the workers
of torch's DataLoader only read.

Where a process cannot fork, a thread writes a copy.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import copy
import ctypes
import gc
import os
import pickle
import select
import signal
import sys
import threading
import warnings
from typing import TYPE_CHECKING, Any

import torch

from notebook_accel.errors import NotebookAccelError
from notebook_accel.private import of_torch
from notebook_accel.training.checkpoint.joint_save import describe
from notebook_accel.training.collectives.nested import recursively_apply
from notebook_accel.training.settings.notices import notice

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from notebook_accel.training.checkpoint.joint_save import JointSave
    from notebook_accel.training.files.pieces import Piece

__all__ = ["HostCopies", "BackgroundSave", "Writer", "make_writer"]

# The longest that an interrupt goes unheard while somebody waits for the writer.
_SLICE_SECONDS = 0.1
# A child begins within milliseconds, on a busy machine within a second.
_BEGIN_SECONDS = 5.0
_FORK_MAY_HANG = sys.version_info < (3, 12)
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


class Writer:
    """Writes in the background; this one copies, :class:`BackgroundSave` writes in its thread."""

    def take(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Copies of the pieces, which later steps of the training cannot change."""
        return [piece.with_state(copy.deepcopy(piece.state)) for piece in pieces]

    def begin(self, work: Callable[[], Any]) -> Callable[[], Any]:
        """Begin ``work``; gives a function that waits for its end, and gives its result.

        A forked process begins at once. Here the work is done as that function is called.
        """
        return work


class ForkingWriter(Writer):
    """Writes by a forked process."""

    def __init__(self) -> None:
        self._copies = HostCopies()

    def take(self, pieces: Sequence[Piece]) -> list[Piece]:
        states = self._copies.copy([piece.state for piece in pieces])
        return [piece.with_state(state) for piece, state in zip(pieces, states, strict=True)]

    def begin(self, work: Callable[[], Any]) -> Callable[[], Any]:
        # Not a pipe: another process that is forked meanwhile would hold its end open. And no file,
        # whose disk may be full.
        answer = os.fdopen(os.memfd_create("checkpoint-answer"), "w+b")
        is_main = threading.current_thread() is threading.main_thread()
        parent = os.getpid()
        # Linux sends the death signal as the *thread* that forked ends, and only the end of the
        # main one is that of the rank.
        child = _fork(lambda: _write_in_child(work, answer, parent if is_main else None))

        def wait() -> Any:
            with contextlib.suppress(ChildProcessError):  # the user's code waits for any child
                os.waitpid(child, 0)
            with answer:
                answer.seek(0)
                outcome = answer.read()
            if not outcome:
                raise NotebookAccelError(
                    "the process that wrote it was killed, most likely for memory: free some, or "
                    "save with async_save=False"
                )
            ok, result = pickle.loads(outcome)
            if not ok:
                raise NotebookAccelError(result)
            return result

        return wait


def _fork(run: Callable[[], Any]) -> int:
    """Fork a child that calls ``run``, which never returns; gives its process id.

    Raises:
        NotebookAccelError: three children in a row hung before they could begin.
    """
    # CPython up to 3.10.14 and 3.11.9 hangs in the child where another thread, one of gloo's say,
    # held the lock of its list of threads at the fork (github.com/python/cpython/issues/112275).
    for _ in range(3):
        begun = os.eventfd(0, os.EFD_CLOEXEC)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
                child = os.fork()
            if not child:
                os.eventfd_write(begun, 1)
                run()
            poll = select.poll()
            poll.register(begun, select.POLLIN)
            if not _FORK_MAY_HANG or poll.poll(_BEGIN_SECONDS * 1000):
                return child
        finally:
            os.close(begun)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    raise NotebookAccelError(
        "the process that was to write it hung three times as it began: update Python "
        f"({sys.version.split()[0]} here; 3.10.15, 3.11.10 and 3.12 are mended), or save with "
        "async_save=False"
    )


def _write_in_child(work: Callable[[], Any], answer: Any, parent: int | None) -> None:
    code = 1
    try:
        if parent is not None:
            ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)
        # An Interrupt is the rank's; and the collector would touch, and so copy, every page.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        gc.disable()
        torch.set_num_threads(1)
        try:
            outcome = (True, work())
        except BaseException as error:  # the process boundary: the rank gets it
            outcome = (False, describe(error))
        answer.write(pickle.dumps(outcome))
        answer.flush()
        code = 0
    finally:
        os._exit(code)


def make_writer() -> Writer:
    """The way to write in the background on this system."""
    return ForkingWriter() if sys.platform == "linux" else Writer()


class BackgroundSave:
    """A save that is being written.

    Args:
        save: of all ranks.
        wait: waits until this rank has written its pieces; gives what rank 0 has to know.
        finish: publishes it, with that; called in a thread.
    """

    def __init__(
        self, save: JointSave, wait: Callable[[], Any], finish: Callable[[Any], None]
    ) -> None:
        self.final = save.final
        self._error: BaseException | None = None

        def run() -> None:
            try:
                try:
                    finish(wait())
                except BaseException as error:
                    save.fail(error)
                    raise
            except BaseException as error:
                self._error = error
                notice(f"{self.final} could not be written: {describe(error)}")

        target = contextvars.copy_context().run
        self._thread = threading.Thread(
            target=target, args=(run,), name="notebook_accel save", daemon=True
        )
        # A script that ends without waiting ends once its last checkpoint is in its place.
        atexit.register(self._thread.join)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the checkpoint is in its place.

        Raises:
            NotebookAccelError: it could not be written.
        """
        while self._thread.is_alive():  # in slices, so that an interrupt is heard
            self._thread.join(_SLICE_SECONDS)
        atexit.unregister(self._thread.join)
        if self._error is not None:
            raise NotebookAccelError(
                f"{self.final} could not be written: {describe(self._error)}. Earlier checkpoints "
                "are as they were"
            ) from self._error


class HostCopies:
    """Copies on the host of tensors that a forked process could not read, or would see change.

    What lies in plain memory of the host needs no copy. What lies on an accelerator does, and what
    is shared between processes. The copies are pinned where there is an accelerator, and the next
    save uses their memory again: pinning costs more than copying.
    """

    def __init__(self) -> None:
        self._buffers: list[torch.UntypedStorage] = []
        self._copied: dict[tuple[torch.device, int], torch.UntypedStorage] = {}

    def copy(self, state: Any) -> Any:
        """``state`` with copies on the host in place of tensors that a fork could not read, or in
        which it would see later steps of the training; they overwrite those of the save before.

        Tensors that share memory still do.
        """
        self._copied = {}
        copied = recursively_apply(self._tensor, state)
        if self._copied and torch.accelerator.is_available():
            torch.accelerator.synchronize()
        return copied

    def _tensor(self, value: torch.Tensor) -> torch.Tensor:
        loaded = sys.modules.get("torch.distributed.tensor")
        if loaded is not None and isinstance(value, loaded.DTensor):
            own = value.to_local()
            copied = self._tensor(own)
            # Not from_local: it would put the part back on the mesh's device.
            return value if copied is own else of_torch.at_other_device(value, copied)
        # A fork goes on to see what the parent writes into memory that processes share, and into
        # pinned memory, which the accelerator's driver maps.
        is_on_host = value.device.type == "cpu"
        if is_on_host and not (value.untyped_storage().is_shared() or value.is_pinned()):
            return value
        value = value.detach()
        copy = torch.empty(0, dtype=value.dtype, device="cpu")
        copy.set_(self._storage(value), value.storage_offset(), value.shape, value.stride())
        return copy

    def _storage(self, value: torch.Tensor) -> torch.UntypedStorage:
        source = value.untyped_storage()
        key = value.device, source.data_ptr()
        if key not in self._copied:
            self._copied[key] = self._buffer(len(self._copied), source.nbytes())
            self._copied[key].copy_(source, non_blocking=True)
        return self._copied[key]

    def _buffer(self, index: int, size: int) -> torch.UntypedStorage:
        if index < len(self._buffers) and self._buffers[index].nbytes() == size:
            return self._buffers[index]
        pinned = torch.accelerator.is_available()
        made = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        self._buffers[index : index + 1] = [made.untyped_storage()]
        return self._buffers[index]
