"""The settings of libraries that are known: one row each, either a state or calls to repeat.

A state is read in the notebook at the launch, and set in the ranks; it holds however a cell changed
it. A call is repeated as the cell has it. To add a library is to add a row.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from functools import partial
from operator import attrgetter
from typing import Any

import psutil

from notebook_accel.system.modules import change_module

# ---- states --------------------------------------------------------------------------------


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


@contextmanager
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
    with suppress(RuntimeError):
        found["float32_matmul_precision"] = torch.get_float32_matmul_precision()
    for path in _FLAGS:
        with suppress(AttributeError, RuntimeError):  # an older torch lacks some of them
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
        with suppress(RuntimeError):  # as above
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


def states() -> Iterator[tuple[str, int, Any]]:
    """Yield modules of the table that are imported here, with the number of a row and its state."""
    for name, rows in _ROWS.items():
        for number, (read, _) in enumerate(rows):
            # Another version of it, or one that is being imported.
            with suppress(Exception):
                yield name, number, read(sys.modules[name])


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
