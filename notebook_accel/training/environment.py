"""Settings in the environment: ours (``NOTEBOOK_ACCEL_*``) first, then Accelerate's."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from notebook_accel.errors import ConfigError
from notebook_accel.text_values import parse_flag

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

__all__ = [
    "CPUInformation",
    "FSDP_READS_ON_RANK_0",
    "USE_FSDP",
    "convert_dict_to_env_variables",
    "disable_fsdp_ram_efficient_loading",
    "enable_fsdp_ram_efficient_loading",
    "get_cpu_distributed_information",
    "are_libraries_initialized",
    "clear_environment",
    "get_int_from_env",
    "parse_choice_from_env",
    "parse_flag_from_env",
    "patch_environment",
    "purge_accelerate_environment",
    "read",
    "read_count",
    "read_flag",
    "str_to_bool",
]

_log = logging.getLogger(__name__)
_PREFIXES = ("NOTEBOOK_ACCEL_", "ACCELERATE_")


def read(name: str) -> str | None:
    """The text of the setting, None where it is not given or empty."""
    found = _find(name)
    return None if found is None else os.environ[found].strip()


def read_flag(name: str) -> bool:
    """The setting as a flag, False where it is not given.

    Raises:
        ConfigError: its text is no flag.
    """
    variable = _find(name)
    return variable is not None and parse_flag(variable, os.environ[variable])


def read_count(name: str) -> int | None:
    """The setting as a whole number of at least 1, None where it is not given."""
    variable = _find(name)
    if variable is None:
        return None
    text = os.environ[variable].strip()
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{variable}={text!r}: expected a whole number of at least 1")
    return int(text)


@contextmanager
def patch_environment(**kwargs: Any) -> Iterator[None]:
    """Set environment variables inside a ``with`` block; what was there comes back after it.

    Args:
        kwargs: the variables' names, put into upper case, and values, made text.
    """
    given = {name.upper(): str(value) for name, value in kwargs.items()}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def clear_environment() -> Iterator[None]:
    """Empty the environment inside a ``with`` block; after it, it is as it was."""
    before = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def purge_accelerate_environment(func_or_cls: Any) -> Any:
    """Decorate a function, or the test methods of a class, to leave no ``ACCELERATE_*`` behind.

    Those that were set before keep their values.

    Args:
        func_or_cls: a function, a coroutine function, or a class; of a class, the methods that
            it and its bases call ``test...``, or ``setUp`` and ``tearDown``.
    """
    if inspect.isclass(func_or_cls):
        for name, method in inspect.getmembers(func_or_cls, inspect.isfunction):
            if name.startswith("test") or name in ("setUp", "tearDown"):
                setattr(func_or_cls, name, purge_accelerate_environment(method))
        return func_or_cls
    if inspect.iscoroutinefunction(func_or_cls):

        @functools.wraps(func_or_cls)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            with _accelerate_variables_kept():
                return await func_or_cls(*args, **kwargs)

        return awaited

    @functools.wraps(func_or_cls)
    def called(*args: Any, **kwargs: Any) -> Any:
        with _accelerate_variables_kept():
            return func_or_cls(*args, **kwargs)

    return called


@contextmanager
def _accelerate_variables_kept() -> Iterator[None]:
    def present() -> dict[str, str]:
        return {name: text for name, text in os.environ.items() if name.startswith("ACCELERATE_")}

    before = present()
    try:
        yield
    finally:
        for name in present().keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """Read a text such as "yes", "on" or "0" as a flag.

    Args:
        value: the text, in any case.
        to_bool: give True or False rather than 1 or 0.

    Raises:
        ConfigError: the text is no flag.
    """
    flag = parse_flag("str_to_bool", value)
    return flag if to_bool else int(flag)


def get_int_from_env(env_keys: Iterable[str], default: int) -> int:
    """The first of some variables that is a number of at least 0, or the default."""
    texts = (os.environ.get(name, "").strip() for name in env_keys)
    return next((int(text) for text in texts if text.isdecimal()), default)


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """A variable as a flag, or the default where it is not set.

    Raises:
        ConfigError: its text is no flag.
    """
    return parse_flag(key, os.environ[key]) if key in os.environ else default


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """A variable as text, or the default where it is not set."""
    return os.environ.get(key, default)


def _find(name: str) -> str | None:
    variables = (prefix + name for prefix in _PREFIXES)
    return next((variable for variable in variables if os.environ.get(variable, "").strip()), None)


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Those of the libraries that this process has imported."""
    return [name for name in library_names if name in sys.modules]


class CPUInformation(NamedTuple):
    """Which rank the environment says that this process is, of how many."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def get_cpu_distributed_information() -> CPUInformation:
    """What torchrun's variables say, or those of MPI (Intel's, Open MPI's, MVAPICH2's)."""
    return CPUInformation(
        rank=get_int_from_env(_of_mpi("RANK", "PMI_RANK", "RANK"), 0),
        world_size=get_int_from_env(_of_mpi("WORLD_SIZE", "PMI_SIZE", "SIZE"), 1),
        local_rank=get_int_from_env(_of_mpi("LOCAL_RANK", "MPI_LOCALRANKID", "LOCAL_RANK"), 0),
        local_world_size=get_int_from_env(
            _of_mpi("LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS", "LOCAL_SIZE"), 1
        ),
    )


def _of_mpi(torchrun: str, intel: str, others: str) -> list[str]:
    return [torchrun, intel, f"OMPI_COMM_WORLD_{others}", f"MV2_COMM_WORLD_{others}"]


def convert_dict_to_env_variables(current_env: Mapping[str, str]) -> list[str]:
    """Lines ``NAME=value`` of an environment; what a shell takes only in quotes is left out."""
    lines = []
    for name, value in current_env.items():
        if not name or not value or set(f"{name}{value}") & set(";\n<> "):
            _log.warning(
                "%s=%s is left out: it is empty or has one of ';<>' or a space", name, value
            )
        else:
            lines.append(f"{name}={value}\n")
    return lines


# Transformers reads both.
USE_FSDP = "ACCELERATE_USE_FSDP"
FSDP_READS_ON_RANK_0 = "FSDP_CPU_RAM_EFFICIENT_LOADING"


def enable_fsdp_ram_efficient_loading() -> None:
    """Have Transformers read a checkpoint on rank 0 alone; the others get its parts."""
    os.environ.setdefault(USE_FSDP, "True")
    os.environ[FSDP_READS_ON_RANK_0] = "True"


def disable_fsdp_ram_efficient_loading() -> None:
    """Have Transformers read a checkpoint on every rank."""
    os.environ[FSDP_READS_ON_RANK_0] = "False"
