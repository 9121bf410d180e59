"""Gives a rank what cells have set up in the notebook (payload/notebook_state.py)."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import sys
import warnings
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from notebook_accel.launch.text.odd_text import unwrapped

if TYPE_CHECKING:
    from notebook_accel.launch.payload.notebook_state import (
        HandlerState,
        LoggerState,
        NotebookState,
    )

__all__ = ["apply_generators", "apply_notebook_state"]


def apply_notebook_state(state: NotebookState) -> None:
    """Make this process's generators and settings those of the notebook."""
    for name, text in state.environment.items():
        os.environ.setdefault(name, text)
    sys.setrecursionlimit(state.recursion_limit)
    _apply_warning_filters(state)
    logging.disable(state.disabled_level)
    for logger in state.loggers:
        _apply_logger(logger)
    _apply_torch_settings(state)
    apply_generators(state)


def apply_generators(state: NotebookState) -> None:
    """Make this process's random numbers begin where the state says."""
    import numpy as np
    import torch

    random.setstate(state.python)
    kind, keys, position, has_gauss, gauss = state.numpy
    if kind:
        numbers = np.frombuffer(keys, dtype=np.uint32)
        np.random.set_state((kind, numbers, position, has_gauss, gauss))
    else:
        np.random.seed(int.from_bytes(keys, "little"))
    # First the seed, which devices start from once they are used, then how far the CPU came.
    # Whether the machine has a device is not asked: that loads the driver, and from then on the
    # function could not say which are visible, and no process that it forks could use one.
    if _may_use_devices():
        torch.manual_seed(state.torch_seed)
    else:
        # torch.manual_seed notes the stack for each kind of device that may come: 5 ms a rank.
        torch.default_generator.manual_seed(state.torch_seed)
    if state.torch_state is not None:
        torch.set_rng_state(torch.frombuffer(bytearray(state.torch_state), dtype=torch.uint8))


def _may_use_devices() -> bool:
    """Whether torch was built for an accelerator, and the launch has not kept this rank from it."""
    import torch

    is_on_cpu = os.environ.get("ACCELERATE_USE_CPU") == "true"
    return not is_on_cpu and torch.accelerator.current_accelerator() is not None


def _apply_torch_settings(state: NotebookState) -> None:
    import torch

    if state.default_dtype is None:
        return
    torch.set_default_dtype(getattr(torch, state.default_dtype))
    flags: dict[str, Any] = state.torch_flags
    deterministic = (flags["deterministic"], flags["deterministic_warn_only"])
    now = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    if deterministic != now:
        # It imports torch._inductor, which takes seconds.
        torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])
    settings: Any = torch.utils.deterministic
    settings.fill_uninitialized_memory = flags["fill_uninitialized_memory"]
    torch.autograd.set_detect_anomaly(flags["anomaly"], flags["anomaly_check_nan"])
    _apply_precisions(state)
    cuda: Any = torch.backends.cuda
    for kind, is_on in state.attention.items():
        getattr(cuda, f"enable_{kind}_sdp")(is_on)


def _apply_precisions(state: NotebookState) -> None:
    """Set only the precisions that differ here from the notebook's.

    A precision that is set for one operation, be it to the default, no longer follows the one that
    the function sets for all of them.
    """
    import torch

    wanted = state.torch_flags["matmul_precision"]
    if wanted and wanted != torch.get_float32_matmul_precision():
        torch.set_float32_matmul_precision(str(wanted))
    for path, value in state.backend_flags.items():
        owner, _, name = f"backends.{path}".rpartition(".")
        module: Any = attrgetter(owner)(torch)
        # Torch raises for the older name of a precision once the newer one was set.
        with contextlib.suppress(RuntimeError):
            if getattr(module, name) != value:
                setattr(module, name, value)


def _apply_logger(state: LoggerState) -> None:
    logger = logging.getLogger(state.name or None)
    if logger.level != state.level:
        logger.setLevel(state.level)  # it walks through all loggers
    logger.propagate = state.propagate
    logger.disabled = state.disabled
    # What the template has imported has its own handlers already.
    if not logger.handlers:
        for handler in state.handlers:
            with contextlib.suppress(OSError):  # a file that this process may not write
                logger.addHandler(_make_handler(handler))


def _make_handler(state: HandlerState) -> logging.Handler:
    handler: logging.Handler
    if state.path:
        # Never mode "w": all ranks and the notebook write to this file.
        path = unwrapped(state.path)
        handler = logging.FileHandler(path, mode="a", encoding=state.encoding, delay=True)
    else:
        handler = logging.StreamHandler(getattr(sys, state.stream))
    handler.setLevel(state.level)
    style: Any = state.style
    # Unchecked: the notebook's formatter may have been made so, as one without any field has to be.
    formatter = logging.Formatter(state.format, state.date_format, style=style, validate=False)
    handler.setFormatter(formatter)
    return handler


def _apply_warning_filters(state: NotebookState) -> None:
    # Each one is put before all others: the last is added first.
    for entry in reversed(state.warning_filters):
        module, _, name = entry.category.partition(":")
        with contextlib.suppress(AttributeError, KeyError, AssertionError, TypeError):
            action: Any = entry.action
            warnings.filterwarnings(
                action,
                message=entry.message,
                category=attrgetter(name)(sys.modules[module]),
                module=entry.module,
                lineno=entry.line,
            )
