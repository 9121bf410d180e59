"""Retry with smaller batches after an out-of-memory error, and free or leave a device's memory."""

from __future__ import annotations

import contextlib
import gc
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer

from notebook_accel.config.checks import as_count
from notebook_accel.errors import ConfigError
from notebook_accel.system.interrupts import held
from notebook_accel.training.collectives.nested import leaves, num_bytes
from notebook_accel.training.processes import devices
from notebook_accel.training.processes.devices import device_module

# Texts of errors that have no type of their own, in lower case: CUDA, HIP, XPU and MPS; cuDNN and
# cuBLAS, which say so when their workspace does not fit; the host's allocator.
_OUT_OF_MEMORY = (
    "out of memory",
    "cudnn_status_not_supported",
    "cudnn_status_alloc_failed",
    "cublas_status_alloc_failed",
    "defaultcpuallocator: can't allocate memory",
    "defaultcpuallocator: not enough memory",
)


def is_out_of_memory(exception: BaseException) -> bool:
    """Return whether an error says that the memory of a device or of the machine ran out.

    Args:
        exception: the error.

    Example:
        >>> from notebook_accel.utils import should_reduce_batch_size
        >>> should_reduce_batch_size(MemoryError())
        True
    """
    if isinstance(exception, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(exception).lower()
    return isinstance(exception, RuntimeError) and any(part in text for part in _OUT_OF_MEMORY)


def memory_parts(
    device: torch.device, models: Iterable[Module], optimizers: Iterable[Optimizer]
) -> dict[str, int]:
    """Return the bytes that parts of a training take of the device's memory, by name."""
    weights = [weight for model in models for weight in model.parameters()]
    states = [dict(optimizer.state) for optimizer in optimizers]
    parts = {
        "weights": num_bytes(weights, device),
        "gradients": num_bytes([weight.grad for weight in weights], device),
        "optimizer": num_bytes(states, device),
    }
    read = devices.memory_reader(device)
    memory = read() if read is not None else None
    if memory is not None:
        # What the failed step had made is dropped again by now.
        most = max(memory.used, memory.peak)
        parts["the rest, such as activations"] = max(0, most - sum(parts.values()))
    return parts


def release_memory(*objects: Any) -> list[None]:
    """Free unused memory, and return a None for each object, to assign to the objects' variables.

    The call collects Python's garbage and empties torch's cache of device memory. The objects
    themselves are freed only by that assignment, and only if nothing else refers to them.

    Args:
        *objects: the objects.

    Returns:
        a list of None, one for each object.

    Example:
        >>> import torch
        >>> from notebook_accel.utils import release_memory
        >>> model = torch.nn.Linear(2, 1)
        >>> (model,) = release_memory(model)
    """
    given = len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return [None] * given


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Free the unused device memory that torch's allocator has cached.

    Args:
        garbage_collection: whether to collect Python's garbage first, which takes a moment.

    Example:
        >>> from notebook_accel.utils import clear_device_cache
        >>> clear_device_cache(garbage_collection=True)
    """
    if garbage_collection:
        gc.collect()
    device = torch.accelerator.current_accelerator()
    if device is not None:
        devices.empty_cache(device)


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[..., int] | None = None,
) -> Any:
    """Decorate a function so that it runs again with smaller batches when memory runs out.

    Call the decorated function without its first argument, the batch size. Later calls begin with
    the size that fitted. Each rank searches on its own: batch sizes are equal on all ranks only if
    all ranks run out of memory with the same sizes.

    Args:
        function: the function; its first argument is the batch size. Leave it out to get a
            decorator, as in the example.
        starting_batch_size: samples per batch in the first attempt.
        reduce_batch_size_fn: returns the next batch size. It is called with the size that failed if
            it requires an argument, else without arguments. None: nine tenths of the size that
            failed.

    Raises:
        ConfigError: ``starting_batch_size`` is no whole number of at least 1, or
            ``reduce_batch_size_fn`` returned no smaller size.
        TypeError: the function has no argument for the batch size, or a call passed one.
        RuntimeError: memory ran out with every size.

    Example:
        >>> from notebook_accel import find_executable_batch_size
        >>> @find_executable_batch_size(starting_batch_size=128)
        ... def train(batch_size):
        ...     if batch_size > 100:
        ...         raise MemoryError
        ...     return batch_size
        >>> train()
        92
    """
    starting_batch_size = as_count("starting_batch_size", starting_batch_size)
    if function is None:
        return partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    start = batch_size = starting_batch_size
    reduce: Callable[..., int] = reduce_batch_size_fn or (lambda size: size * 9 // 10)
    try:
        inspect.signature(reduce).bind()
        takes_size = False
    except TypeError:
        takes_size = True
    name = getattr(function, "__name__", type(function).__name__)

    @wraps(function)
    def search(*args: Any, **kwargs: Any) -> Any:
        nonlocal batch_size
        try:
            inspect.signature(function).bind(0, *args, **kwargs)
        except TypeError as error:
            raise TypeError(
                f"{name}() is given its batch size, as its first argument, by "
                f"find_executable_batch_size: leave it out of the call ({error})"
            ) from None
        while batch_size > 0:
            clear_device_cache(garbage_collection=True)
            try:
                return function(batch_size, *args, **kwargs)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                reason = str(error) or type(error).__name__
            # Out here: the error's traceback held the tensors of the try.
            smaller = reduce(batch_size) if takes_size else reduce()
            if not isinstance(smaller, int) or smaller >= batch_size:
                raise ConfigError(
                    f"reduce_batch_size_fn gave {smaller!r} after {batch_size}: expected a smaller "
                    "whole number"
                )
            batch_size = smaller
        batch_size = start
        clear_device_cache(garbage_collection=True)
        raise RuntimeError(
            f"No executable batch size found: {name}() ran out of memory with each one "
            f"from {start} down. Free what the process holds (release_memory) or make the model "
            f"smaller. The last error: {reason}"
        )

    return search


@contextlib.contextmanager
def off_device(
    device: torch.device, models: Sequence[Module], optimizers: Sequence[Optimizer]
) -> Iterator[None]:
    """Move weights, gradients, buffers and optimizer states to the host within the block.

    The tensors stay the objects that they are: only the memory behind them is given back. What lies
    on the host already stays there. An interrupt is raised where all lies in one place: what is
    trained is rescued after it.
    """
    kind = device.type
    if kind in ("cpu", "xla"):
        yield
        return
    placed = [[*model.parameters(), *model.buffers()] for model in models]
    states = [[one.param_groups, [*one.state.values()]] for one in optimizers]
    tensors = [one for one in leaves([placed, states]) if isinstance(one, torch.Tensor)]
    tensors += [one.grad for one in tensors if one.is_leaf and one.grad is not None]
    # Not by a check for DTensor: its import takes a second, for sharded training alone.
    local = (getattr(one, "to_local", one.detach)().untyped_storage() for one in tensors)
    on_device = (one for one in local if one.device.type == kind and one.nbytes())
    module = device_module(kind)
    module.synchronize()
    copies = []
    try:
        with held():
            for storage in {one.data_ptr(): one for one in on_device}.values():
                view = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
                copies.append((storage, storage.nbytes(), view.cpu()))
                del view
                storage.resize_(0)
            module.empty_cache()
        yield
    finally:
        with held():
            while copies:
                storage, size, copy = copies.pop()
                storage.resize_(size)
                torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).copy_(copy)
            module.synchronize()
