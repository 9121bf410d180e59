"""The settings of libraries that are known: one row each, either a state or calls to repeat.

A state is read in the notebook at the launch, and set in the ranks; it holds however a cell changed
it. A call is repeated as the cell has it. To add a library is to add a row.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from fnmatch import fnmatchcase
from operator import methodcaller
from typing import Any

# ---- states --------------------------------------------------------------------------------


def _verbosity(module: Any) -> Any:
    # transformers and diffusers have the same module; in the older ones, bars were always shown.
    bars = getattr(module, "is_progress_bar_enabled", lambda: True)
    return module.get_verbosity(), bars()


def _set_verbosity(module: Any, state: Any) -> None:
    level, bars = state
    module.set_verbosity(level)
    if _verbosity(module)[1] != bars:
        (module.enable_progress_bar if bars else module.disable_progress_bar)()


def _datasets(module: Any) -> Any:
    disabled = module.utils.are_progress_bars_disabled()
    return module.utils.logging.get_verbosity(), disabled, module.is_caching_enabled()


def _set_datasets(module: Any, state: Any) -> None:
    level, no_bars, caching = state
    module.utils.logging.set_verbosity(level)
    (module.utils.disable_progress_bars if no_bars else module.utils.enable_progress_bars)()
    (module.enable_caching if caching else module.disable_caching)()


def _set_hub_bars(module: Any, disabled: Any) -> None:
    (module.disable_progress_bars if disabled else module.enable_progress_bars)()


def _pandas(module: Any) -> Any:
    found: dict[str, Any] = {}
    kind = type(module.options)

    def walk(options: Any, prefix: str) -> None:
        for name in dir(options):
            value = getattr(options, name)
            if isinstance(value, kind):
                walk(value, f"{prefix}{name}.")
            else:
                found[prefix + name] = value

    with warnings.catch_warnings():  # pandas warns of options that will go
        warnings.simplefilter("ignore")
        walk(module.options, "")
    return found


def _set_pandas(module: Any, state: Any) -> None:
    before = _pandas(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, value in state.items():
            if name in before and before[name] != value:
                module.set_option(name, value)


def _matplotlib(module: Any) -> Any:
    defaults = module.rcParamsDefault
    # The backend is the rank's own: it draws into the notebook.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            name: value
            for name, value in module.rcParams.copy().items()
            if not name.startswith("backend") and value != defaults.get(name)
        }


def _set_numpy(module: Any, state: Any) -> None:
    module.set_printoptions(**state[0])
    module.seterr(**state[1])


def _set_collector(module: Any, state: Any) -> None:
    (module.enable if state[0] else module.disable)()
    module.set_threshold(*state[1])


_Row = tuple[Callable[[Any], Any], Callable[[Any, Any], object]]


def _by_functions(get: str, setter: str) -> _Row:
    return methodcaller(get), lambda module, value: getattr(module, setter)(value)


_CONFIG: _Row = (methodcaller("get_config"), lambda module, state: module.set_config(**state))
# By module: what reads a state that can be pickled from it (None or {}: nothing to carry), and what
# gives it another one.
_ROWS: dict[str, _Row] = {
    "datasets": (_datasets, _set_datasets),
    "decimal": (lambda module: module.getcontext().copy(), lambda m, state: m.setcontext(state)),
    "diffusers.utils.logging": (_verbosity, _set_verbosity),
    "evaluate.utils.logging": (_verbosity, _set_verbosity),
    "gc": (lambda module: (module.isenabled(), module.get_threshold()), _set_collector),
    "huggingface_hub.utils": (methodcaller("are_progress_bars_disabled"), _set_hub_bars),
    "locale": (lambda m: m.setlocale(m.LC_ALL), lambda m, state: m.setlocale(m.LC_ALL, state)),
    "matplotlib": (_matplotlib, lambda module, state: module.rcParams.update(state)),
    "numpy": (lambda module: (module.get_printoptions(), module.geterr()), _set_numpy),
    "pandas": (_pandas, _set_pandas),
    "sklearn": _CONFIG,
    "sys": _by_functions("getrecursionlimit", "setrecursionlimit"),
    "torch.multiprocessing": _by_functions("get_sharing_strategy", "set_sharing_strategy"),
    # A set: in one order, a session sees whether it is the same as before.
    "torch.serialization": (
        lambda module: sorted(module.get_safe_globals(), key=str),
        lambda module, state: module.add_safe_globals(state),
    ),
    "transformers.utils.logging": (_verbosity, _set_verbosity),
    "xgboost": _CONFIG,
}


def states() -> Iterator[tuple[str, Any]]:
    """Yield the modules of the table that are imported here, with their states."""
    for name, (read, _) in _ROWS.items():
        if name in sys.modules:
            with suppress(Exception):  # another version of it, or one that is being imported
                if (state := read(sys.modules[name])) not in (None, {}):
                    yield name, state


def set_state(module: Any, state: Any) -> None:
    """Give a module of the table a state (a step); one that it has is not set again."""
    read, setter = _ROWS[module.__name__]
    if read(module) != state:
        setter(module, state)


def warning_filters() -> list[tuple[str, tuple[Any, ...]]]:
    """Return filters for warnings of libraries: the category's module, and its arguments.

    The filter with the lowest precedence comes first. Those for Python's own categories travel
    with the state of the notebook's process (payload/notebook_state.py).
    """
    found = []
    for action, message, category, module, line in reversed(warnings.filters):
        if not isinstance(category, type):  # nothing that ``warnings.filterwarnings`` makes
            continue
        name = category.__module__
        if name in sys.modules and name not in ("builtins", "__main__"):
            patterns = (_text(message), category.__qualname__, _text(module))
            found.append((name, (action, *patterns, line)))
    return found


def _text(pattern: Any) -> str:
    return str(getattr(pattern, "pattern", pattern) or "")


def set_warning_filter(module: Any, filter_: tuple[Any, ...]) -> None:
    """Add a filter for warnings of a category in ``module`` (a step)."""
    action, message, category, where, line = filter_
    warnings.filterwarnings(action, message, getattr(module, category), where, line)


# ---- calls ---------------------------------------------------------------------------------

# Patterns of calls that are repeated, by the function's own name or as the cell has it.
_REPEATED = (
    *("cv2.set*", "faulthandler.enable", "mlflow*.autolog", "mlflow.set_*"),
    *("multiprocessing.set_*", "polars.*Config.set_*", "resource.setrlimit"),
    *("socket.setdefaulttimeout", "torch.backends.*", "torch.hub.set_dir"),
    *("torch.multiprocessing.set_start_method", "torch.set_flush_denormal"),
    *("torch.set_grad_enabled", "torch.set_num_*", "torch.set_printoptions"),
    *("torch.set_warn_always", "timm.*.set_*", "tqdm.*.pandas", "transformers.*.register"),
)

# Patterns of calls that need no repeating: what they set travels by itself or by a row, is each
# rank's own, or is for the notebook alone.
_NEEDLESS = (
    *("*seed*", "IPython.*", "altair.*", "atexit.*", "bokeh.*", "datasets.*", "decimal.*"),
    *("diffusers.utils.logging.*", "evaluate.*", "gc.*", "google.colab.*"),
    *("huggingface_hub.*", "ipywidgets.*", "locale.*", "logging.*", "matplotlib.*"),
    *("matplotlib_inline.*", "notebook_accel.*", "numpy.*", "os.*", "pandas.*", "plotly.*"),
    *("random.*", "seaborn.*", "sklearn.*", "sys.*", "torch.accelerator.*"),
    *("torch.autograd.*", "torch.cuda.*", "torch.multiprocessing.set_sharing_strategy"),
    *("torch.serialization.*", "torch.set_default_*", "torch.set_deterministic_debug_mode"),
    *("torch.set_float32_matmul_precision", "torch.set_rng_state"),
    *("torch.use_deterministic_algorithms", "transformers.logging.set_*"),
    *("transformers.utils.logging.*", "warnings.*", "xgboost.*"),
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
