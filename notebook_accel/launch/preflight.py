"""Checks before a launch, each with its remedy; nothing has been started when one fails."""

from __future__ import annotations

import inspect
import resource
import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from notebook_accel.errors import ConfigError, LaunchError
from notebook_accel.launch.system import processes

if TYPE_CHECKING:
    from notebook_accel.config import LaunchConfig

__all__ = ["check_call", "check_machine"]

# Of an agent, for each rank: its channel, log, watch and stacks; gloo's mesh is in the ranks.
_FILES_A_RANK = 6
_FILES_BESIDE = 64
_MAX_SHOWN = 200


def check_call(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> None:
    """Refuse a call that must fail in every rank.

    Raises:
        ConfigError: ``function`` is no function, or does not take these arguments.
    """
    if not callable(function):
        raise ConfigError(
            f"the first argument is {_short(function)}; expected the function itself, without "
            "calling it: notebook_launcher(train, args=(...)), not notebook_launcher(train(...))"
        )
    _check_arguments(args, kwargs)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args, **(kwargs or {}))
    except TypeError as error:
        name = getattr(function, "__name__", "the function")
        raise ConfigError(
            f"{name}{signature} cannot be called with these arguments: {error}"
        ) from None


def _check_arguments(args: object, kwargs: object) -> None:
    if isinstance(args, Mapping):
        raise ConfigError(f"args={_short(args)}: arguments with names go to kwargs=")
    if isinstance(args, (str, bytes)) or not isinstance(args, Sequence):
        shown = _short(args)
        raise ConfigError(f"args={shown}: expected a tuple of arguments, such as args=({shown},)")
    is_named = isinstance(kwargs, Mapping) and all(isinstance(name, str) for name in kwargs)
    if kwargs is not None and not is_named:
        raise ConfigError(
            f"kwargs={_short(kwargs)}: expected a dictionary of arguments by their names"
        )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"<{type(value).__name__}>"


def check_machine(config: LaunchConfig, world_size: int) -> None:
    """Refuse what this machine cannot hold.

    Raises:
        LaunchError: the platform, the limit of open files, or the port.
    """
    if config.engine != "inline" and not processes.supported():
        raise LaunchError(
            "launching processes needs Linux (5.3 or newer) for now; on other systems take "
            "engine='inline', which runs the function in the notebook's own process"
        )
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _FILES_BESIDE + max(_FILES_A_RANK, 2) * world_size
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise LaunchError(
            f"{world_size} ranks need about {needed} open files, and this machine's hard limit is "
            f"{hard} (ulimit -Hn): ask for fewer ranks, or have the limit raised"
        )
    if config.use_port is not None and not _is_free(config.use_port):
        raise LaunchError(
            f"use_port={config.use_port} is taken on this machine: choose another, or leave it "
            "out and a free one is found"
        )


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
