"""States of the notebook's process that its ranks take over, and calls of libraries to repeat.

    notebook: capture() --step (setup/__init__.py) of the ranks' first call--> rank: apply()
              states()  --steps of each call, where one has changed----------> rank: set_state()

Ranks are not forked from the notebook, so they inherit none of its settings. They are sent the
states of the random number generators, and levels and plain handlers of logging.
Each rank gets the same state, so that an unseeded ``random_split`` gives the same split on all.
Not carried are torch's default device (each rank has its own), and logging handlers and formatters
of custom classes, or with filters.

The settings of libraries that are known have one row each, either a state or calls to repeat. A
state holds however a cell changed it. A call is repeated as the cell has it. To add a library is to
add a row.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import random
import re
import secrets
import sys
import warnings
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from functools import partial
from multiprocessing.process import current_process
from operator import attrgetter
from typing import Any

import psutil

from notebook_accel.system.modules import change_module

# ---- states of libraries -------------------------------------------------------------------


_Row = tuple[Callable[[Any], Any], Callable[[Any, Any], object]]


def _by(names: str) -> _Row:
    """Return a row by the names of functions: "get set" of a value, or "ask enable disable"."""
    get, *setters = map(attrgetter, names.split())

    def set_(module: Any, value: Any) -> None:
        if len(setters) > 1:
            setters[not value](module)()
        elif isinstance(value, dict):
            setters[0](module)(**value)
        else:
            setters[0](module)(*value if isinstance(value, tuple) else (value,))

    return lambda module: get(module)(), set_


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    # Libraries warn of settings that will go.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@_quiet()
def _options(owner: Any) -> dict[str, Any]:
    """Return pandas' options, or one group of them; each group within is a dict as well."""
    found = {name: getattr(owner, name) for name in dir(owner)}
    return {n: _options(v) if isinstance(v, type(owner)) else v for n, v in found.items()}


@_quiet()
def _set_options(owner: Any, state: dict[str, Any]) -> None:
    for name, value in state.items():
        if isinstance(value, dict):
            _set_options(getattr(owner, name), value)
        elif getattr(owner, name, value) != value:
            setattr(owner, name, value)


@_quiet()
def _matplotlib(module: Any) -> Any:
    defaults = module.rcParamsDefault
    # The backend is the rank's own: it draws into the notebook.
    return {
        name: value
        for name, value in module.rcParams.copy().items()
        if not name.startswith("backend") and value != defaults.get(name)
    }


def _filters(module: Any) -> list[Any]:
    """Return the filters of warnings; the one with the lowest precedence comes first."""
    found = []
    for action, message, category, where, line in reversed(module.filters):
        if getattr(category, "__module__", "__main__") != "__main__":
            named = category.__module__, category.__qualname__
            found.append((*named, action, _pattern(message), _pattern(where), line))
    return found


def _pattern(pattern: Any) -> str:
    """Return a warning filter's pattern as text of a regular expression; "" matches anything."""
    if isinstance(pattern, str):
        return rf"{re.escape(pattern)}\Z"
    return str(getattr(pattern, "pattern", ""))


def _set_filters(module: Any, state: list[Any]) -> None:
    def add(rest: tuple[Any, ...], owner: Any) -> None:
        category, action, message, where, line = rest
        module.filterwarnings(action, message, attrgetter(category)(owner), where, line)

    for name, *rest in state:
        # Not before a rank imports what has the category.
        change_module(name, partial(add, tuple(rest)))


# Torch reads it as it loads: it makes "high" the default precision of products, as TF32.
_TF32_OVERRIDE = "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
_OF_PRODUCTS = "backends.cuda.matmul.fp32_precision"
# What of torch cells set by assignment. A rank sets them in this order: what holds for all before
# what holds for one, since later names are newer (torch 2.9).
_FLAGS = (
    "utils.deterministic.fill_uninitialized_memory",
    *(f"backends.cudnn.{name}" for name in ("deterministic", "benchmark", "allow_tf32")),
    *("backends.fp32_precision", "backends.cudnn.fp32_precision", _OF_PRODUCTS),
    *("backends.cudnn.conv.fp32_precision", "backends.cudnn.rnn.fp32_precision"),
)


@_quiet()
def _torch_flags(torch: Any) -> dict[str, Any]:
    # That of the process's start: torch may have been loaded when a cell set another.
    found = {_TF32_OVERRIDE: psutil.Process().environ().get(_TF32_OVERRIDE)}
    # Once a newer name of a precision was used, torch refuses the older one.
    with contextlib.suppress(RuntimeError):
        found["float32_matmul_precision"] = torch.get_float32_matmul_precision()
    for path in _FLAGS:
        with contextlib.suppress(AttributeError, RuntimeError):  # an older torch lacks some of them
            found[path] = attrgetter(path)(torch)
    return found


def _set_torch_flags(torch: Any, state: dict[str, Any]) -> None:
    override, products = state.pop(_TF32_OVERRIDE), state.pop("float32_matmul_precision", None)
    if products == "highest" and override != os.environ.get(_TF32_OVERRIDE):
        # What a cell or ``env=`` has set for ranks, the notebook's own torch did not read.
        products = None
        state.pop(_OF_PRODUCTS, None)
    # Of precisions only what differs: one that is set for an operation, be it to the default, no
    # longer follows the one that the function sets for all of them.
    if products not in (None, _torch_flags(torch).get("float32_matmul_precision")):
        torch.set_float32_matmul_precision(products)
    for path, value in state.items():
        owner, _, name = path.rpartition(".")
        with contextlib.suppress(RuntimeError):  # as above
            if attrgetter(path)(torch) != value:
                setattr(attrgetter(owner)(torch), name, value)


_CONFIG = _by("get_config set_config")
_VERBOSITY = _by("get_verbosity set_verbosity")
# transformers and diffusers have the same module.
_LOGGING = (_VERBOSITY, _by("is_progress_bar_enabled enable_progress_bar disable_progress_bar"))
_NO_BARS = "are_progress_bars_disabled {0}disable_progress_bars {0}enable_progress_bars"
# By module: what reads states that can be pickled from it, and what gives it others.
_ROWS: dict[str, tuple[_Row, ...]] = {
    "datasets": (
        _by("utils.logging.get_verbosity utils.logging.set_verbosity"),
        _by("utils." + _NO_BARS.format("utils.")),
        _by("is_caching_enabled enable_caching disable_caching"),
    ),
    "decimal": (_by("getcontext setcontext"),),
    "diffusers.utils.logging": _LOGGING,
    "evaluate.utils.logging": _LOGGING,
    "gc": (_by("isenabled enable disable"), _by("get_threshold set_threshold")),
    "huggingface_hub.utils": (_by(_NO_BARS.format("")),),
    "matplotlib": ((_matplotlib, lambda module, state: module.rcParams.update(state)),),
    "numpy": (_by("get_printoptions set_printoptions"), _by("geterr seterr")),
    "pandas": ((lambda m: _options(m.options), lambda m, state: _set_options(m.options, state)),),
    "sklearn": (_CONFIG,),
    "sys": (_by("getrecursionlimit setrecursionlimit"),),
    "torch": (
        _by("get_default_dtype set_default_dtype"),
        (
            lambda torch: (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
            # It imports torch._inductor, which takes seconds.
            lambda torch, state: torch.use_deterministic_algorithms(state[0], warn_only=state[1]),
        ),
        (
            lambda torch: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
            lambda torch, state: torch.autograd.set_detect_anomaly(*state),
        ),
        (_torch_flags, _set_torch_flags),
    ),
    "torch.multiprocessing": (_by("get_sharing_strategy set_sharing_strategy"),),
    "transformers.utils.logging": _LOGGING,
    "warnings": ((_filters, _set_filters),),
    "xgboost": (_CONFIG,),
}


def states() -> Iterator[tuple[Any, ...]]:
    """Yield the arguments of ``pack_step`` for each state of a module that is imported here."""
    for name, rows in _ROWS.items():
        for number, (read, _) in enumerate(rows):
            # Another version of it, or one that is being imported.
            with contextlib.suppress(Exception):
                state = read(sys.modules[name])
                about = f"state {name} {number}", f"settings of {name}"
                yield *about, name, set_state, number, state


def set_state(module: Any, number: int, state: Any) -> None:
    """Give a module of the table a state (a step); one that it has is not set again."""
    read, setter = _ROWS[module.__name__][number]
    if read(module) != state:
        setter(module, state)


# ---- calls ---------------------------------------------------------------------------------

# Patterns of calls that are repeated, by the function's own name or as the cell has it.
_REPEATED = (
    *("cv2.set*", "faulthandler.enable", "locale.setlocale", "mlflow*.autolog", "mlflow.set_*"),
    *("multiprocessing.set_*", "polars.*Config.set_*", "resource.setrlimit"),
    *("socket.setdefaulttimeout", "torch.backends.*", "torch.hub.set_dir"),
    *("torch.multiprocessing.set_start_method", "torch.serialization.*"),
    *("torch.set_flush_denormal", "torch.set_grad_enabled", "torch.set_num_*"),
    *("torch.set_printoptions", "torch.set_warn_always", "timm.*.set_*", "tqdm.*.pandas"),
    *("transformers.*.register",),
)
# Patterns of calls that need no repeating: what they set travels by itself or by a row, is each
# rank's own, or is for the notebook alone.
_NEEDLESS = (
    *("*seed*", "IPython.*", "altair.*", "atexit.*", "bokeh.*", "evaluate.*", "google.colab.*"),
    *("huggingface_hub.*", "ipywidgets.*", "logging.*", "matplotlib_inline.*", "notebook_accel.*"),
    *("os.*", "plotly.*", "random.*", "seaborn.*", "torch.accelerator.*", "torch.autograd.*"),
    *("torch.cuda.*", "torch.set_default_*", "torch.set_rng_state"),
    *("torch.set_deterministic_debug_mode", "torch.set_float32_matmul_precision"),
    *("torch.use_deterministic_algorithms", "transformers.logging.set_*"),
    *(f"{name}.*" for name in _ROWS if name != "torch"),
)
_SETS = re.compile(r"set_|set$|set[A-Z]|register|enable|disable|use$|use_|configure|.*option")


def is_repeated(*names: str) -> bool:
    """Return whether ranks repeat a call of the function that has these dotted names."""
    return _any_fits(names, _REPEATED)


def is_unknown_setter(*names: str) -> bool:
    """Return whether a function sounds as if it sets something that no row carries."""
    last = names[0].rpartition(".")[2]
    return bool(_SETS.match(last)) and not _any_fits(names, _NEEDLESS)


def _any_fits(names: tuple[str, ...], patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


# ---- generators, logging and arguments ---------------------------------------------------------

# What makes a logging handler, its level and its formatter.
_Handler = tuple["Callable[[], logging.Handler]", int, logging.Formatter]


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
    python: tuple[Any, ...], numpy: dict[str, Any] | int, torch_seed: int, torch_state: bytes | None
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
