"""What this machine has, and checks before a launch.

A child process asks torch for the accelerators: a process that uses a GPU takes some GPU memory, so
this process must not use one. Each check raises an error that says what to do, before anything is
started.
"""

from __future__ import annotations

import inspect
import os
import socket
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from notebook_accel import tpu
from notebook_accel.config import LaunchConfig, shares_devices
from notebook_accel.config.checks import check_enough, shown, too_old_torch
from notebook_accel.errors import ConfigError, LaunchError
from notebook_accel.launch.rank_environment import num_cores, rank_environment
from notebook_accel.launch.template.handle import ask_template
from notebook_accel.launch.text.wording import did_you_mean
from notebook_accel.system import processes
from notebook_accel.system.interrupts import held
from notebook_accel.system.limits import check_open_files, files_needed, hard_limit
from notebook_accel.wire import Devices

_GIB = 1024**3
# Of a rank that has imported torch, before it has a model.
_BYTES_OF_RANK = _GIB // 4
# With more, a training on the CPU mostly waits for its turn.
_MAX_RANKS_OF_CORE = 4
# Characters of a value in an error; of a longer one, its type.
_MAX_SHOWN = 200
# Set in each process that torchrun, ``accelerate launch`` or this package's launcher starts.
_OF_LAUNCHERS = ("TORCHELASTIC_RUN_ID", "NOTEBOOK_ACCEL_RUN")
_INLINE = "otherwise take engine='inline', which runs the function in the notebook's own process"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The accelerators, cores and memory of this machine.

    Attributes:
        found: the accelerators and library versions, as torch has them.
        memory: total memory of the host, in bytes.
        free_memory: available memory of the host, in bytes.
        tpu: one line about the machine's TPU and the library for it; "" if there is no TPU.
    """

    found: Devices
    num_cores: int
    memory: int
    free_memory: int
    tpu: str = ""


def look_at_machine(found: Devices | None = None) -> Machine:
    """Return the devices, cores and memory of this machine; a child process asks torch.

    If the child process fails, there are no devices, and their ``error`` says why.

    Args:
        found: accelerators that were counted already; nothing is asked then.
    """
    if found is None:
        environment = rank_environment(LaunchConfig())
        try:
            found = ask_template(environment, lambda source: source.count_devices(environment))
        except LaunchError as failed:
            found = Devices(kind="cpu", error=str(failed))
    memory = psutil.virtual_memory()
    return Machine(
        found=found,
        num_cores=num_cores(),
        memory=memory.total,
        free_memory=memory.available,
        tpu=tpu.summary(),
    )


# ---- checks ----------------------------------------------------------------------------------


def check_call(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> None:
    """Raise an error if the call ``function(*args, **kwargs)`` cannot work in any rank."""
    # A model is callable as well: who wrote train(...) for train passes the model that it returned.
    if not callable(function) or hasattr(type(function), "state_dict"):
        raise ConfigError(
            f"the first argument is {_short(function)}; expected the function itself, without "
            "calling it: notebook_launcher(train, args=(...)), not notebook_launcher(train(...))"
        )
    kinds = inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction
    if any(is_kind(function) for is_kind in kinds):
        raise ConfigError(
            f"a call of {getattr(function, '__name__', 'the function')} runs nothing by itself, "
            "since it has `async def` or `yield`; expected a function that does the training, such "
            "as `def train(): return asyncio.run(main())`, or `return list(main())`"
        )
    if isinstance(args, Mapping):
        raise ConfigError(f"args={_short(args)}: arguments with names go to kwargs=")
    if isinstance(args, (str, bytes)) or not isinstance(args, Sequence):
        given = _short(args)
        raise ConfigError(f"args={given}: expected a tuple of arguments, such as args=({given},)")
    is_named = isinstance(kwargs, Mapping) and all(isinstance(name, str) for name in kwargs)
    if kwargs is not None and not is_named:
        raise ConfigError(
            f"kwargs={_short(kwargs)}: expected a dictionary of arguments by their names"
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args, **(kwargs or {}))
    except TypeError as error:
        name, known = getattr(function, "__name__", "the function"), signature.parameters
        why, unknown = str(error), [one for one in kwargs or () if one not in known]
        takes_any = any(one.kind is one.VAR_KEYWORD for one in known.values())
        if unknown and not takes_any:
            # Of a misspelt argument Python may say that another one is missing.
            why += "" if repr(unknown[0]) in why else f"; it takes no argument {unknown[0]!r}"
            why += did_you_mean(unknown[0], known)
        raise ConfigError(
            f"{name}{signature} cannot be called with these arguments: {why}"
        ) from None


def _short(value: object) -> str:
    text = shown(value)
    return text if len(text) <= _MAX_SHOWN else f"<{type(value).__name__}>"


def check_platform() -> None:
    """Raise an error if this system cannot start the processes of a run; start none."""
    if too_old := too_old_torch():
        raise LaunchError(too_old)
    is_launched = not os.environ.keys().isdisjoint(_OF_LAUNCHERS)
    if is_launched and (ranks := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise LaunchError(
            f"this process is rank {os.environ.get('RANK')} of {ranks} that a launcher started, "
            "each of which would start ranks of its own: call the function itself here, or run the "
            "script without the launcher, as python train.py"
        )
    with held():  # an interrupt in it would leave a descriptor open
        check_open_files()
        is_supported = processes.supported()
    if not is_supported:
        raise LaunchError(
            "launching processes needs Linux (5.3 or newer) for now, and in a container a profile "
            f"that allows pidfd_open (Docker 20.10 or newer has one); {_INLINE}"
        )
    try:
        os.getcwd()
    except OSError as error:
        raise LaunchError(
            f"the notebook's current folder is gone ({error.strerror}), and ranks start in it: "
            "change to one that exists with os.chdir(...), then launch again"
        ) from None
    try:
        folder = tempfile.gettempdir()
        # An interrupt after the file is opened, and before an object owns it, would leave its
        # descriptor open for good.
        with held(), tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise LaunchError(
            f"there is no folder for temporary files ({error}): set TMPDIR to a folder that can "
            "be written, before the kernel starts, then launch again"
        ) from None


def check_port(config: LaunchConfig) -> None:
    """Raise an error if the port that the user chose (``use_port``) cannot be bound here."""
    if config.use_port is None:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", config.use_port))
        except OSError as error:
            raise LaunchError(
                f"use_port={config.use_port} cannot be had on this machine ({error.strerror}): "
                "choose another, or leave it out and a free one is found"
            ) from None


def check_fits(config: LaunchConfig, machine: Machine) -> None:
    """Raise an error if the settings choose devices or a number of ranks that ``machine`` lacks."""
    wanted, chosen, number = config.num_processes, config.devices, len(machine.found.names)
    if isinstance(chosen, tuple) and not machine.found.error and max(chosen) >= number:
        there = ", ".join(map(str, range(number)))
        has = f"the accelerators {there}: choose among these, or" if there else "none: take"
        raise ConfigError(f"devices={list(chosen)}, but this machine has {has} devices='cpu'")
    if wanted is None:
        return
    check_files_of_ranks(wanted)
    if number and config.devices is None and not shares_devices(config):
        check_enough(wanted, number, f"this machine has {number}")


def crowding(config: LaunchConfig, machine: Machine) -> str:
    """Return a warning if there are too many ranks for the machine's cores or memory; else ""."""
    ranks = config.num_processes or 1
    needed = ranks * _BYTES_OF_RANK
    has_cores = ranks <= _MAX_RANKS_OF_CORE * machine.num_cores
    if ranks == 1 or (has_cores and needed <= machine.free_memory):
        return ""
    return (
        f"{ranks} ranks share {machine.num_cores} CPU cores, and take about {needed / _GIB:.1f} GB "
        f"of memory before they have a model: {machine.free_memory / _GIB:.1f} GB are free"
    )


def check_files_of_ranks(world_size: int) -> None:
    """Raise an error if the agent could not open enough files for its ranks."""
    hard, needed = hard_limit(), files_needed(world_size)
    if hard is not None and hard < needed:
        ranks = "1 rank needs" if world_size == 1 else f"{world_size} ranks need"
        advice = "have it raised" if world_size == 1 else "ask for fewer ranks, or have it raised"
        raise LaunchError(
            f"{ranks} about {needed} open files, and this machine's hard limit is {hard} "
            f"(ulimit -Hn): {advice}"
        )
