"""The only place where private names of Python, and of libraries besides torch, are used."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import sys
import threading
from contextlib import AbstractContextManager
from contextvars import ContextVar
from datetime import timedelta
from multiprocessing import util
from typing import Any

# ---- Python


def join_threads() -> None:
    """Wait for this process's threads, as Python does at its exit.

    A rank is a forked child, which ends without Python's usual exit. This uses
    ``threading._shutdown``. If Python removed it, a rank would end before the threads that its
    function started, and their work would be lost.
    """
    threading._shutdown()  # type: ignore[attr-defined]


def forget_exit_functions() -> None:
    """Forget the ``atexit`` functions that were registered before a fork.

    A process calls this just after it was forked. This uses ``atexit._clear``. If Python removed
    it, the process would run, at its exit, the functions that its parent registered for itself.
    """
    atexit._clear()


def run_exit_functions() -> None:
    """Call the functions registered with ``atexit``; have multiprocessing end its workers.

    This uses ``atexit._run_exitfuncs``. If Python removed it, these functions would never be called
    in a rank: a process that multiprocessing forked ends without calling them. It also uses
    ``util._run_finalizers``. If Python removed it, a pool would wait for ever if a worker got
    SIGTERM, as all remaining children of a rank do next, while it held a lock.
    """
    atexit._run_exitfuncs()
    util._run_finalizers(0)  # type: ignore[attr-defined]


def end_multiprocessing() -> None:
    """Join this process's children and flush its queues.

    This uses ``multiprocessing.util._exit_function``. If Python removed it, the last items that a
    rank put into a queue might not arrive.
    """
    util._exit_function()  # type: ignore[attr-defined]


def process_settings() -> dict[str, Any]:
    """Return multiprocessing's settings of this process, which the caller changes.

    This uses ``Process._config``. The caller sets the folder for temporary files and the prefix of
    semaphore names. With multiprocessing's own values, semaphores and sockets of killed workers
    could not be found, and would stay until the machine restarts.
    """
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    return config


# ---- Hugging Face's datasets


def is_split_by_node(dataset: Any) -> bool:
    """Return whether ``split_dataset_by_node`` made a stream of one rank's samples from another.

    This uses ``IterableDataset._distributed``. If datasets removed it, such a stream would be split
    again, and each rank would read only a part of its samples.
    """
    return bool(getattr(getattr(dataset, "_distributed", None), "world_size", 1) > 1)


# ---- debugpy's debugger, pydevd


def without_debugger() -> AbstractContextManager[None]:
    """Return a context in which processes that this thread starts get no debugger.

    A notebook's debugger (JupyterLab's, VS Code's) rewrites the command of each Python process that
    is started, and the process then waits for a debugger that nobody attaches. This uses
    ``pydev_monkey.skip_subprocess_arg_patch``. If pydevd removed it, launches would hang while the
    debugger is on.
    """
    # None until a debugger was attached to this process.
    patches: Any = sys.modules.get("_pydev_bundle.pydev_monkey")
    skip = getattr(patches, "skip_subprocess_arg_patch", contextlib.nullcontext)
    found: AbstractContextManager[None] = skip()
    return found


# ---- DeepSpeed


def has_stepped_copy(weight: Any) -> bool:
    """Return whether DeepSpeed's optimizer steps a float32 copy of a weight.

    The result is the same on all ranks, even on those that step no part of the weight. This looks
    for the attributes ``_z3_optimizer`` and ``_hp_mapping`` of the weight. If DeepSpeed renamed
    them, the float32 copies would be missed: the next step would overwrite loaded weights, and
    saved weights would have only 16 bits.
    """
    return hasattr(weight, "_z3_optimizer") or hasattr(weight, "_hp_mapping")


def forget_deepspeed_groups(library: Any) -> None:
    """Make DeepSpeed drop its process groups.

    A rank calls this before a training if an earlier training used a process group that is gone.
    This uses ``_release_process_group_references``. If DeepSpeed removed it, the second training of
    a session would use the old groups and fail.
    """
    release = getattr(library.utils.groups, "_release_process_group_references", None)
    if release is not None:
        release(group=None)


# ---- ipykernel


def publish_status(kernel: Any, status: str, request: Any) -> None:
    """Send a status for a request to the notebook's pages.

    After a click, a page waits for the status "idle" before it sends the next click. This uses
    ``Kernel._publish_status``. If ipykernel removed it, a click while a cell runs would raise an
    error, and the page would hold back further clicks.
    """
    kernel._publish_status(status, "shell", parent=request)


def parent_variable(kernel: Any) -> ContextVar[Any] | None:
    """Return the context variable that holds the request being answered.

    This uses ``Kernel._shell_parent``. Return None if this ipykernel has no such variable: a page
    that is reloaded while a cell runs then does not show its widgets until the cell has ended.
    """
    return getattr(kernel, "_shell_parent", None)


def let_any_subshell_answer(comm: Any) -> None:
    """Let any subshell of the kernel handle a comm's messages.

    This uses ``_reply_subshell_for``, which exists since ipykernel 7.4. If it were ignored, clicks
    would go to the shell that runs the cell, and wait until the cell has ended.
    """
    if hasattr(comm, "_reply_subshell_for"):
        comm._reply_subshell_for = None


# ---- torchdata


def num_read(reader: Any) -> int:
    """Return how many batches a data loader's iterator has given; 0 if unknown.

    For the iterator of a StatefulDataLoader that continues from a restored state, the batches
    before that state count, too. This uses ``_num_yielded``. If torchdata removed it,
    ``skip_first_batches`` would skip those batches twice.
    """
    return getattr(reader, "_num_yielded", 0)


# ---- transformers


def restore_arguments(arguments: Any, state: dict[str, Any]) -> None:
    """Set the state of ``TrainingArguments`` from another process, with the device of this one.

    They keep the device that they found when they were made, and the number of GPUs. To let them
    look again would reset the state of accelerate below a ``Trainer``.
    """
    import torch

    vars(arguments).update(state)
    on_cpu = state.get("use_cpu") or os.environ.get("ACCELERATE_USE_CPU") == "true"
    kind = None if on_cpu else torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        device = torch.device("cpu")
    else:
        rank = int(os.environ.get("LOCAL_RANK", "0"))
        device = torch.device(kind.type, rank % torch.accelerator.device_count())
    for name, found in state.items():
        # The cached property has another name in older releases.
        if name.endswith("_setup_devices") and found.type != "xla":
            vars(arguments)[name] = device
        elif name == "_n_gpu":
            vars(arguments)[name] = 0 if kind is None else 1
    later = state.get("distributed_state")
    if later is not None:
        # As they would have made it here.
        more = {"cpu": True} if on_cpu else {"timeout": timedelta(seconds=state["ddp_timeout"])}
        vars(later)["settings"] = {"backend": state["ddp_backend"], **more}
