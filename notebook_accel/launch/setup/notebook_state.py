"""Carries process-wide settings, which cells may have changed, from the notebook to its ranks.

    notebook: capture() --step (setup/__init__.py) of the ranks' first call--> rank: apply()

Ranks are not forked from the notebook, so they inherit none of its settings. They are sent the
states of the random number generators, and levels and plain handlers of logging.
Each rank gets the same state, so that an unseeded ``random_split`` gives the same split on all.

Not carried are torch's default device (each rank has its own), and logging handlers and formatters
of custom classes, or with filters. Settings of torch and other libraries are in launch/setup.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import random
import secrets
import sys
from collections.abc import Callable
from functools import partial
from multiprocessing.process import current_process
from typing import Any

# What makes a logging handler, its level and its formatter.
_Handler = tuple["Callable[[], logging.Handler]", int, logging.Formatter]
# ---- in the notebook -----------------------------------------------------------------------


def capture(seed: int | None = None) -> dict[str, Any]:
    """Return the state of this process for :func:`apply`, without changing any of it."""
    named = (logging.root, *logging.root.manager.loggerDict.values())
    loggers = (_logger(one) for one in named if isinstance(one, logging.Logger))
    return {
        "generators": generators(seed),
        "loggers": [one for one in loggers if one is not None],
        "disabled_level": logging.root.manager.disable,
        "authkey": bytes(current_process().authkey),
        "arguments": _arguments(),
    }


def generators(seed: int | None = None) -> dict[str, Any]:
    """Return the states of the generators for :func:`apply_generators`; import no library for it.

    If this process has not imported numpy or torch, the state has a new random seed for that
    library's generator, the same for all ranks. ``torch_state`` is None if torch's generator on the
    CPU starts from ``torch_seed``.

    Args:
        seed: gives the states that ``set_seed(seed)`` would lead to; None takes the present ones.
    """
    if seed is not None:  # as set_seed(seed) leaves them
        python = random.Random(seed).getstate()
        return {"python": python, "numpy": seed % 2**32, "torch_seed": seed, "torch_state": None}
    torch: Any = sys.modules.get("torch")
    # A module that is being imported by another thread has not all of its names yet.
    torch = torch if hasattr(torch, "get_rng_state") else None
    numpy: Any = getattr(sys.modules.get("numpy"), "random", None)
    has_state = hasattr(numpy, "get_state")
    return {
        "python": random.getstate(),
        "numpy": numpy.get_state(legacy=False) if has_state else secrets.randbits(32),
        "torch_seed": torch.initial_seed() if torch else secrets.randbits(63),
        "torch_state": torch.get_rng_state().numpy().tobytes() if torch else None,
    }


def _arguments() -> tuple[str, ...]:
    """Return ``sys.argv``; without those with which a kernel was started, which no parser knows."""
    given = sys.argv[1:]
    app: Any = getattr(sys.modules.get("ipykernel.kernelapp"), "IPKernelApp", None)
    is_kernels = app and app.initialized() and given == sys.orig_argv[-len(given) :]
    return ("",) if is_kernels else tuple(sys.argv)


def _logger(logger: logging.Logger) -> tuple[Any, ...] | None:
    """Return a logger's settings as arguments of ``_apply_logger``; None if it has the defaults."""
    is_root = logger is logging.root
    # A library that is imported in a rank adds its own handlers there: lines would come twice.
    top = logger.name.partition(".")[0]
    is_of_library = not is_root and top in sys.modules and top != "__main__"
    own = [] if is_of_library else logger.handlers
    if not (logger.level or own or logger.disabled or not logger.propagate):
        return None
    handlers = [*filter(None, map(_handler, own))]
    # Handlers of the loggers above it show its lines as well.
    is_heard = logger.propagate and logger.parent is not None and logger.parent.hasHandlers()
    if own and not handlers and not is_heard and 0 < logger.level < logging.WARNING:
        # Rich's, say. Without any handler, Python would show warnings and drop what is below.
        formatter = logging.Formatter(logging.BASIC_FORMAT)
        handlers = [(partial(_stream_handler, "stderr"), own[0].level, formatter)]
    name = None if is_root else logger.name
    return name, logger.level, logger.propagate, logger.disabled, handlers


def _handler(handler: logging.Handler) -> _Handler | None:
    """Return a factory that remakes a logging handler in a rank, its level, and its formatter.

    Return None for a handler that cannot be sent. Only a plain FileHandler, a NullHandler, or a
    StreamHandler of stdout or stderr, can be sent; it must have a plain Formatter and no filters.
    The open file of a FileHandler is switched to append mode.
    """
    formatter = handler.formatter or logging.Formatter()
    if type(formatter) is not logging.Formatter or handler.filters:
        return None
    make: Callable[[], logging.Handler]
    if type(handler) is logging.FileHandler:
        # Never mode "w": all ranks and the notebook write to this file. The notebook's own would
        # write at its position, over the lines of the ranks, also where it is open already.
        stream: Any = handler.stream
        with contextlib.suppress(AttributeError, OSError, ValueError):  # not opened yet, or closed
            number = stream.fileno()
            flags = fcntl.fcntl(number, fcntl.F_GETFL)
            fcntl.fcntl(number, fcntl.F_SETFL, flags | os.O_APPEND)
        make = partial(logging.FileHandler, handler.baseFilename, "a", handler.encoding, delay=True)
    elif type(handler) is logging.StreamHandler and (name := _stream_name(handler.stream)):
        make = partial(_stream_handler, name)
    elif type(handler) is logging.NullHandler:
        make = logging.NullHandler
    else:
        return None
    return make, handler.level, formatter


def _stream_name(stream: Any) -> str:
    for name in ("stdout", "stderr"):
        # Under their names, Python, ipykernel and test runners have others.
        is_own = stream in (getattr(sys, name), getattr(sys, f"__{name}__"))
        if is_own or str(getattr(stream, "name", "")).strip("<>") == name:
            return name
    return ""


# ---- in a rank -----------------------------------------------------------------------------


def apply(state: dict[str, Any]) -> None:
    """Give this process, a rank, the generator states and settings of the notebook (a step)."""
    if logging.root.manager.disable != state["disabled_level"]:
        logging.disable(state["disabled_level"])
    current_process().authkey = state["authkey"]
    sys.argv[:] = state["arguments"]
    for logger in state["loggers"]:
        _apply_logger(*logger)
    apply_generators(**state["generators"])


def apply_generators(
    python: tuple[Any, ...],
    numpy: dict[str, Any] | int,
    torch_seed: int,
    torch_state: bytes | None,
) -> None:
    """Set the random generators of Python, numpy and torch in this process to the given states."""
    import numpy as np
    import torch

    random.setstate(python)
    if isinstance(numpy, int):
        np.random.seed(numpy)
    else:
        np.random.set_state(numpy)
    # First the seed, which devices start from once they are used, then how far the CPU came.
    # Whether the machine has a device is not asked: that loads the driver, and from then on the
    # function could not say which are visible, and no process that it forks could use one.
    is_on_cpu = os.environ.get("ACCELERATE_USE_CPU") == "true"
    if not is_on_cpu and torch.accelerator.current_accelerator() is not None:
        torch.manual_seed(torch_seed)
    else:
        # torch.manual_seed notes the stack for each kind of device that may come: 5 ms a rank.
        torch.default_generator.manual_seed(torch_seed)
    if torch_state is not None:
        torch.set_rng_state(torch.frombuffer(bytearray(torch_state), dtype=torch.uint8))


def _apply_logger(
    name: str | None, level: int, propagate: bool, disabled: bool, handlers: list[_Handler]
) -> None:
    is_new = name is not None and name not in logging.root.manager.loggerDict
    logger = logging.getLogger(name)
    if is_new:
        logger.level = level
    elif logger.level != level:
        # It walks through all loggers: each page with one would be this rank's own.
        logger.setLevel(level)
    if (logger.propagate, logger.disabled) != (propagate, disabled):
        logger.propagate, logger.disabled = propagate, disabled
    # What the template has imported has its own handlers already.
    if not logger.handlers:
        for make, handler_level, formatter in handlers:
            handler = make()
            handler.setLevel(handler_level)
            handler.setFormatter(formatter)
            logger.addHandler(handler)


def _stream_handler(name: str) -> logging.Handler:
    return logging.StreamHandler(getattr(sys, name))
