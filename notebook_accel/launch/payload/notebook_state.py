"""What cells have set up in the notebook's process beside their variables.

    notebook: capture() -> NotebookState --bytes--> rank: worker/apply_notebook_state.py

A fork of the notebook would have all of it. Ranks are no forks of it, and are given: the states of
the random number generators, torch's settings, logging, warning filters, how much libraries of
Hugging Face log, and the limit of recursion. Each rank gets the same, so that an unseeded
``random_split`` is the same split on all of them.

What is not carried: torch's default device (a rank has its own), gradient mode, print options,
handlers and formatters of logging that are classes of their own, filters of logging, the factory of
its records, handlers whose format takes a field that only one of these or ``defaults`` gives, and
warning filters whose category a module defines that the rank has not imported.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import random
import re
import secrets
import sys
import warnings
from operator import attrgetter
from typing import Any

import msgspec

from notebook_accel.launch.text.odd_text import wrapped

__all__ = [
    "KINDS_OF_ATTENTION",
    "HandlerState",
    "LoggerState",
    "NotebookState",
    "WarningFilter",
    "capture",
    "from_bytes",
]

# Libraries that read from a variable, when they are imported, how much they are to log.
_VERBOSITY = {
    "transformers": "TRANSFORMERS_VERBOSITY",
    "diffusers": "DIFFUSERS_VERBOSITY",
    "datasets": "DATASETS_VERBOSITY",
    "huggingface_hub": "HF_HUB_VERBOSITY",
}
# What of torch.backends cells set, by its path there. A rank sets them in this order: the older
# name of a precision before the newer ones (torch 2.9), what holds for all before what for one.
_BACKEND_FLAGS = (
    "cudnn.enabled",
    "cudnn.deterministic",
    "cudnn.benchmark",
    "cudnn.allow_tf32",
    "fp32_precision",
    "cudnn.fp32_precision",
    "cuda.matmul.fp32_precision",
    "cudnn.conv.fp32_precision",
    "cudnn.rnn.fp32_precision",
    "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
)
# Of scaled_dot_product_attention, as torch.backends.cuda names what turns them on and off.
KINDS_OF_ATTENTION = ("flash", "mem_efficient", "math", "cudnn")
# Names of streams as Python, ipykernel and test runners have them.
_STREAMS = {"<stdout>": "stdout", "stdout": "stdout", "<stderr>": "stderr", "stderr": "stderr"}
_FORMATS = {
    logging.PercentStyle: "%",
    logging.StrFormatStyle: "{",
    logging.StringTemplateStyle: "$",
}


class HandlerState(msgspec.Struct, frozen=True, kw_only=True):
    """A plain handler of logging: to ``stream`` ("stdout" or "stderr"), or to the file ``path``.

    The path is ``wrapped`` (odd_text.py): a folder may have a name that is not UTF-8.
    """

    stream: str = ""
    path: str = ""
    encoding: str | None = None
    level: int = 0
    format: str | None = None
    date_format: str | None = None
    style: str = "%"


class LoggerState(msgspec.Struct, frozen=True, kw_only=True):
    """A logger that somebody has set up; the root logger's name is ""."""

    name: str
    level: int
    propagate: bool
    disabled: bool
    handlers: tuple[HandlerState, ...]


class WarningFilter(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of ``warnings.filters``; patterns as text, the category as "module:name"."""

    action: str
    message: str
    category: str
    module: str
    line: int


class NotebookState(msgspec.Struct, frozen=True, kw_only=True):
    """All that ranks are given.

    Attributes:
        python: ``random.getstate()``.
        numpy: of numpy's global generator: kind, keys, position, whether a Gaussian is cached,
            and which. Kind "" stands for a generator that is still to be seeded: ``keys`` is then
            a seed of four bytes, little-endian.
        torch_seed: ``torch.initial_seed()``, from which the generators of devices start.
        torch_state: of torch's generator on the CPU; None where the notebook has no torch.
        default_dtype: its name, such as "float64"; None where the notebook has no torch.
        torch_flags: deterministic algorithms and the like, by the names in
            :func:`_torch_flags`.
        backend_flags: settings of torch.backends by their path there, those that this torch has.
        attention: by kind, whether scaled_dot_product_attention may take it.
        loggers: the root logger first.
        disabled_level: of ``logging.disable``.
        warning_filters: the first one counts first.
        environment: variables that a rank gets where it has none of the name.
        recursion_limit: of ``sys.setrecursionlimit``.
    """

    python: tuple[int, tuple[int, ...], float | None]
    numpy: tuple[str, bytes, int, int, float]
    torch_seed: int
    torch_state: bytes | None = None
    default_dtype: str | None = None
    torch_flags: dict[str, bool | str] = {}
    backend_flags: dict[str, bool | str] = {}
    attention: dict[str, bool] = {}
    loggers: tuple[LoggerState, ...] = ()
    disabled_level: int = 0
    warning_filters: tuple[WarningFilter, ...] = ()
    environment: dict[str, str] = {}
    recursion_limit: int = 1000

    def to_bytes(self) -> bytes:
        """What :func:`from_bytes` reads."""
        return msgspec.msgpack.encode(self)


def from_bytes(data: bytes) -> NotebookState:
    """The state in ``data``.

    Raises:
        msgspec.DecodeError: the bytes hold no such state.
    """
    return msgspec.msgpack.decode(data, type=NotebookState)


def capture(seed: int | None = None) -> NotebookState:
    """The state of this process. It imports nothing, and draws from no generator.

    A library that was never imported here has no state: its generator starts from a new seed,
    the same one in each rank.

    Args:
        seed: what the generators start from, rather than from where they stand here.
    """
    torch: Any = sys.modules.get("torch")
    # A module that is being imported by another thread has not all of its names yet.
    torch = torch if hasattr(torch, "get_rng_state") and hasattr(torch, "backends") else None
    return NotebookState(
        **(_generators(torch) if seed is None else _seeded_generators(seed)),
        default_dtype=str(torch.get_default_dtype()).removeprefix("torch.") if torch else None,
        torch_flags=_torch_flags(torch) if torch else {},
        backend_flags=_backend_flags(torch) if torch else {},
        attention=_attention(torch) if torch else {},
        loggers=_loggers(),
        disabled_level=logging.root.manager.disable,
        warning_filters=_warning_filters(),
        environment=_verbosity(),
        recursion_limit=sys.getrecursionlimit(),
    )


def _generators(torch: Any) -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": _numpy_state(),
        "torch_seed": torch.initial_seed() if torch else secrets.randbits(63),
        "torch_state": torch.get_rng_state().numpy().tobytes() if torch else None,
    }


def _seeded_generators(seed: int) -> dict[str, Any]:
    """What ``set_seed(seed)`` in a rank would leave."""
    of_numpy = (seed % 2**32).to_bytes(4, "little")
    python = random.Random(seed).getstate()
    return {"python": python, "numpy": ("", of_numpy, 0, 0, 0.0), "torch_seed": seed}


def _numpy_state() -> tuple[str, bytes, int, int, float]:
    generator: Any = getattr(sys.modules.get("numpy"), "random", None)
    if generator is None or not hasattr(generator, "get_state"):
        return "", secrets.token_bytes(4), 0, 0, 0.0
    state = generator.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        # The notebook has put another one in its place (numpy.random.set_bit_generator), whose
        # state a rank's own cannot take: it gives the seed.
        return "", hashlib.blake2b(repr(state).encode(), digest_size=4).digest(), 0, 0, 0.0
    keys, position = state["state"]["key"].tobytes(), int(state["state"]["pos"])
    return "MT19937", keys, position, int(state["has_gauss"]), float(state["gauss"])


def _torch_flags(torch: Any) -> dict[str, bool | str]:
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "fill_uninitialized_memory": torch.utils.deterministic.fill_uninitialized_memory,
        "anomaly": torch.is_anomaly_enabled(),
        "anomaly_check_nan": torch.is_anomaly_check_nan_enabled(),
        "matmul_precision": _matmul_precision(torch),
    }


def _matmul_precision(torch: Any) -> str:
    """The precision by its older name; "" where torch refuses, since a newer one was used."""
    try:
        return str(torch.get_float32_matmul_precision())
    except RuntimeError:
        return ""


def _backend_flags(torch: Any) -> dict[str, bool | str]:
    found = {}
    for path in _BACKEND_FLAGS:
        # An older torch lacks some of them; and once a newer name was used, torch raises for the
        # older name of the same setting.
        with contextlib.suppress(AttributeError, RuntimeError):
            found[path] = attrgetter(path)(torch.backends)
    return found


def _attention(torch: Any) -> dict[str, bool]:
    cuda = torch.backends.cuda
    return {kind: getattr(cuda, f"{kind}_sdp_enabled")() for kind in KINDS_OF_ATTENTION}


# ---- logging -------------------------------------------------------------------------------


def _loggers() -> tuple[LoggerState, ...]:
    named = logging.root.manager.loggerDict.values()
    return tuple(
        _logger(logger)
        for logger in (logging.root, *named)
        if isinstance(logger, logging.Logger) and _is_set_up(logger)
    )


def _is_set_up(logger: logging.Logger) -> bool:
    handlers = () if _is_of_library(logger) else logger.handlers
    return bool(logger.level or handlers or logger.disabled or not logger.propagate)


def _is_of_library(logger: logging.Logger) -> bool:
    # A library that is imported in a rank adds its own handlers there: lines would come twice.
    return logger is not logging.root and logger.name.partition(".")[0] in sys.modules


def _logger(logger: logging.Logger) -> LoggerState:
    handlers = [] if _is_of_library(logger) else [_handler(handler) for handler in logger.handlers]
    return LoggerState(
        name="" if logger is logging.root else logger.name,
        level=logger.level,
        # Numbers, where logging.config.fileConfig has set them, or a dictConfig of JSON.
        propagate=bool(logger.propagate),
        disabled=bool(logger.disabled),
        handlers=tuple(handler for handler in handlers if handler is not None),
    )


def _handler(handler: logging.Handler) -> HandlerState | None:
    """A handler of a plain kind, None for all others."""
    formatter = handler.formatter or logging.Formatter()
    if type(formatter) is not logging.Formatter or type(formatter._style) not in _FORMATS:
        return None
    if _takes_more_than_travels(handler, formatter):
        return None
    stream = path = ""
    encoding = None
    if type(handler) is logging.StreamHandler:
        stream = _stream_name(handler.stream)
    elif type(handler) is logging.FileHandler:
        path, encoding = wrapped(handler.baseFilename), handler.encoding
        _append_from_now_on(handler)
    if not stream and not path:
        return None
    return HandlerState(
        stream=stream,
        path=path,
        encoding=encoding,
        level=handler.level,
        format=formatter._fmt,
        date_format=formatter.datefmt,
        style=_FORMATS[type(formatter._style)],
    )


def _takes_more_than_travels(handler: logging.Handler, formatter: logging.Formatter) -> bool:
    """Whether the format needs a field that only the notebook's own filters or factories give.

    Ranks have none of these, so that each line would be lost there, with an error in its place.
    Where the notebook has none either, the calls that log give the field (``extra=``), or an
    adapter does, and both travel.
    """
    known = logging.root.manager.loggerDict.values()
    adds_fields = (
        handler.filters
        or getattr(formatter._style, "_defaults", None)
        or logging.getLogRecordFactory() is not logging.LogRecord
        or any(one.filters for one in (logging.root, *known) if isinstance(one, logging.Logger))
    )
    if not adds_fields:
        return False
    style: Any = _FORMATS[type(formatter._style)]
    plain = logging.LogRecord("", logging.INFO, "", 1, "", (), None)
    try:
        logging.Formatter(formatter._fmt, style=style, validate=False).format(plain)
    except (ValueError, TypeError, AttributeError, LookupError):  # a field that it has not
        return True
    return False


def _append_from_now_on(handler: logging.FileHandler) -> None:
    """Have each line written at the file's end, also after lines that ranks wrote.

    A file that was opened with mode "w" is written where this process's last line ended, over what
    ranks wrote since.
    """
    stream: Any = handler.stream
    with contextlib.suppress(AttributeError, OSError, ValueError):  # not opened yet, or closed
        number = stream.fileno()
        fcntl.fcntl(number, fcntl.F_SETFL, fcntl.fcntl(number, fcntl.F_GETFL) | os.O_APPEND)


def _stream_name(stream: Any) -> str:
    for name in ("stdout", "stderr"):
        if stream is getattr(sys, name) or stream is getattr(sys, f"__{name}__"):
            return name
    return _STREAMS.get(str(getattr(stream, "name", "")), "")


def _verbosity() -> dict[str, str]:
    found = {}
    for library, variable in _VERBOSITY.items():
        level = logging.getLevelName(logging.getLogger(library).level).lower()
        if library in sys.modules and level in ("debug", "info", "warning", "error", "critical"):
            found[variable] = level
    return found


# ---- warnings ------------------------------------------------------------------------------


def _warning_filters() -> tuple[WarningFilter, ...]:
    entries: Any = warnings.filters
    return tuple(
        WarningFilter(
            action=action,
            message=_pattern(message),
            category=f"{category.__module__}:{category.__qualname__}",
            module=_pattern(module),
            line=line,
        )
        for action, message, categories, module, line in entries
        # warnings.simplefilter takes a tuple of them, too.
        for category in (categories if isinstance(categories, tuple) else (categories,))
    )


def _pattern(pattern: Any) -> str:
    """The text of a pattern; Python's own filters have a plain text in its place."""
    if isinstance(pattern, re.Pattern):
        return str(pattern.pattern)
    return "" if pattern is None else rf"{re.escape(pattern)}\Z"
