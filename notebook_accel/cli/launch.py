"""``notebook-accel launch``: runs a script on several ranks, which torchrun starts and watches.

    options, files, variables, Slurm --settings, machines--> environment of the ranks
                                                       `---> torch.distributed.run

All settings reach the ranks by environment variables, as with ``accelerate launch``: the script
needs no arguments and no code for them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

from torch.distributed import run as torchrun

from notebook_accel.cli.options import add_settings, refuse_option, resolve_options
from notebook_accel.cli.terminal import LABEL, ranks_in_terminal
from notebook_accel.config import LaunchConfig
from notebook_accel.config.engines import ENGINES
from notebook_accel.errors import ConfigError
from notebook_accel.launch import preflight
from notebook_accel.launch.preflight import look_at_machine
from notebook_accel.launch.rank_environment import (
    INTERFACES,
    ON_CPU,
    WITHOUT_DEVICES,
    num_threads_of,
    rank_environment,
    variables_of_choice,
)
from notebook_accel.launch.slurm import slurm_step
from notebook_accel.system.processes import kill_leftovers

# Options of torchrun, and the settings that they take where they are not given.
_SETTINGS = {
    "nnodes": "num_nodes",
    "master_addr": "master_addr",
    "master_port": "use_port",
    "max_restarts": "max_restarts",
    "shutdown_timeout": "grace",
}
# Environment variable by which the processes of a launch are found.
_MARK = "NOTEBOOK_ACCEL_LAUNCH"
_ELASTIC_LOG = "torch.distributed.elastic.multiprocessing.api"


def launch(arguments: Sequence[str]) -> int:
    """``notebook-accel launch [options] script.py [arguments]``: 1 if a rank failed, else 0."""
    typed, unknown = launch_parser().parse_known_args(arguments)
    if unknown:
        refuse_option(unknown[0])
    _check_script(typed)
    config, machines, notices = resolve_options(typed)
    if not ENGINES[config.engine].runs_scripts:
        raise ConfigError(
            f"engine={config.engine!r} runs functions of a notebook, and torchrun starts scripts: "
            "leave --engine out"
        )
    return run_typed(typed, config, machines, notices)


def launch_parser() -> ArgumentParser:
    """Return torchrun's options and the settings; None where other sources may set an option."""
    parser: ArgumentParser = torchrun.get_args_parser()
    parser.prog = "notebook-accel launch"
    parser.usage = "notebook-accel launch [options] script.py [arguments of the script]"
    parser.description = "Run a script on several ranks. The first options are torchrun's."
    parser.allow_abbrev = False
    parser.set_defaults(nproc_per_node=None, nnodes=None, node_rank=None, rdzv_backend=None)
    # Some versions of torch have a number as the port's default, which would hide all others.
    parser.set_defaults(master_port=None, master_addr=None, max_restarts=None)
    add_settings(parser)
    return parser


def run_typed(
    typed: Namespace, config: LaunchConfig, machines: dict[str, Any], notices: Sequence[str]
) -> int:
    """Start the ranks by torchrun and wait for their end; return 1 if one failed, else 0.

    It changes ``typed`` and this process's environment, which the ranks inherit.

    Raises:
        ConfigError, LaunchError: no rank was started; the message says why.
        KeyboardInterrupt, SystemExit: a signal ended the ranks.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    _place_machines(typed, machines, config)
    notices = [*notices, *_prepare_environment(typed, config)]
    for line in notices:
        print(f"notebook-accel: {line}", file=sys.stderr)
    if config.seed is not None:
        if typed.no_python:
            raise ConfigError(f"seed={config.seed}: with --no-python the program seeds itself")
        kind, script = "module" if typed.module else "script", typed.training_script
        typed.training_script_args = [str(config.seed), kind, script, *typed.training_script_args]
        typed.training_script, typed.module = "notebook_accel.cli.seeded", True
    # It names the rank that failed, as the last line here does.
    logging.getLogger(_ELASTIC_LOG).setLevel(logging.CRITICAL)
    try:
        with _killed_with_this_process(), _shown(typed):
            torchrun.run(typed)  # type: ignore[no-untyped-call]
    except SignalException as error:  # the ranks have ended
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        sys.exit(128 + error.sigval)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        ended = failure.signal_name() if failure.exitcode < 0 else f"exit code {failure.exitcode}"
        print(f"notebook-accel: rank {rank} failed ({ended})", file=sys.stderr)
        return 1
    return 0


def _check_script(typed: Namespace) -> None:
    """Raise ConfigError for a script, module or program that is not there."""
    name = typed.training_script
    if typed.module and typed.no_python:
        raise ConfigError("--module and --no-python exclude each other: leave one out")
    if typed.no_python:
        if shutil.which(name) is None:
            raise ConfigError(f"there is no program {name!r} that can be run")
    elif typed.module:
        # Where `python -m` looks first.
        sys.path.insert(0, os.getcwd())
        try:
            found = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            found = None
        if found is None:
            raise ConfigError(f"there is no module {name!r} in {os.getcwd()} or installed")
    elif not os.path.exists(name):
        raise ConfigError(f"there is no script {name!r} in {os.getcwd()}")


def _place_machines(typed: Namespace, machines: dict[str, Any], config: LaunchConfig) -> None:
    """Fill in torchrun's options from the config file, settings, Slurm and defaults, in this order.

    ConfigError if there are several machines, and no address at which they meet.
    """
    for name, value in machines.items():
        if getattr(typed, name) is None:
            setattr(typed, name, value)
    settings = config.to_dict()
    for option, name in _SETTINGS.items():
        # Older versions of torch lack some.
        if getattr(typed, option, name) is None:
            setattr(typed, option, settings.get(name))
    step = slurm_step(os.environ) if typed.nnodes is None and not typed.rdzv_endpoint else None
    if step is not None:
        typed.nnodes, typed.node_rank = step.num_nodes, step.node_rank
        typed.master_addr = typed.master_addr or step.master_addr
        typed.master_port = typed.master_port or step.port
    typed.nnodes = str(typed.nnodes or 1)
    typed.node_rank = int(typed.node_rank or 0)
    typed.max_restarts = int(typed.max_restarts or 0)
    typed.rdzv_backend = typed.rdzv_backend or "static"
    if typed.nnodes == "1":
        # Otherwise ranks meet at the machine's own name, which may not be known to it.
        typed.local_addr = typed.local_addr or "127.0.0.1"
        if typed.rdzv_backend == "static" and not (typed.master_port or typed.rdzv_endpoint):
            # A free port. Older versions of torch would take 29500: for one launch alone.
            typed.rdzv_backend, typed.rdzv_endpoint = "c10d", "localhost:0"
    elif typed.rdzv_backend == "static" and not (typed.master_addr or typed.rdzv_endpoint):
        raise ConfigError(
            f"{typed.nnodes} machines, and no address at which they meet: give --main_process_ip, "
            "the address of the one with --machine_rank 0, on each of them"
        )
    typed.master_addr = typed.master_addr or "127.0.0.1"
    typed.master_port = typed.master_port or 29500  # as torchrun


def _prepare_environment(typed: Namespace, config: LaunchConfig) -> list[str]:
    """Set the ranks' variables and, in ``typed``, their number on this machine; return notices.

    Raises:
        ConfigError: there are more ranks than devices, or machines do not divide their number.
        LaunchError: the port is in use, or too few files can be opened.
    """

    from notebook_accel.training.processes.devices import inventory

    _, num_nodes = torchrun.parse_min_max_nnodes(typed.nnodes)
    # In a child: to ask a device for its name makes a context on it, which stays.
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as child:
        found = child.submit(inventory).result()
    machine = look_at_machine(found)
    chosen = config.devices
    available = len(chosen) if isinstance(chosen, tuple) else len(found.names)
    on_cpu = chosen == "cpu" or not found.names
    notices: list[str] = []
    if typed.nproc_per_node is not None:
        size = _num_ranks_typed(typed.nproc_per_node)
    elif config.num_processes is not None and "num_nodes" in config.to_dict():
        size = config.num_processes
    elif config.num_processes is not None:
        # Accelerate's file and its options count the ranks of all machines.
        size, rest = divmod(config.num_processes, num_nodes)
        if rest or not size:
            raise ConfigError(
                f"num_processes={config.num_processes} on {num_nodes} machines: expected a "
                "multiple of them, as many on each"
            )
    else:
        size = 1 if on_cpu else available
        if on_cpu and chosen != "cpu":
            notices.append("no accelerator is visible: 1 rank on the CPU (--num_processes 2: two)")
    here = replace(config, num_processes=size, use_port=None, parallelism=None)
    preflight.check_fits(here, machine)
    if typed.node_rank == 0 and not typed.rdzv_endpoint:
        preflight.check_port(replace(here, use_port=typed.master_port))
    of_engine = variables_of_choice(chosen, found.kind)
    if on_cpu:
        of_engine = {**ON_CPU, **(WITHOUT_DEVICES if chosen == "cpu" else {})}
    environment = rank_environment(config, of_engine=of_engine)
    # By the loopback's, several machines cannot meet.
    for name in INTERFACES if num_nodes > 1 else ():
        if name not in os.environ and name not in (config.env or {}):
            del environment[name]
    threads = typed.num_cpu_threads_per_process or num_threads_of(environment, size)
    environment["OMP_NUM_THREADS"] = str(threads)
    # With a store of torchrun's own, the group that is made after a restart finds the old one's
    # addresses there.
    environment.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    os.environ.clear()
    os.environ.update(environment)
    typed.nproc_per_node = str(size)
    return notices


def _num_ranks_typed(text: str) -> int:
    try:
        return int(torchrun.determine_local_world_size(text))
    except ValueError as error:
        raise ConfigError(f"--nproc_per_node {text}: {error}") from None


@contextlib.contextmanager
def _killed_with_this_process() -> Iterator[None]:
    """A child watches for this process's end by SIGKILL: torchrun's ranks would go on for good."""
    variable = _MARK, secrets.token_hex(8)
    os.environ[_MARK] = variable[1]
    watched, held = os.pipe()
    watcher = os.fork()
    if not watcher:
        try:
            os.close(held)
            os.setsid()  # not reached by Ctrl+C
            if not os.read(watched, 1):
                kill_leftovers(session=os.getpid(), variable=variable)
        finally:
            os._exit(0)
    os.close(watched)
    try:
        yield
    finally:
        os.write(held, b"e")
        os.close(held)
        os.waitpid(watcher, 0)


@contextlib.contextmanager
def _shown(typed: Namespace) -> Iterator[None]:
    """Label the ranks' output, unless there is one, or ``--tee`` or ``--redirects``."""
    if typed.nproc_per_node == "1" or typed.tee != "0" or typed.redirects != "0":
        yield
        return
    with tempfile.TemporaryDirectory(prefix="notebook-accel-") as folder, ranks_in_terminal():
        typed.tee, typed.log_dir = "3", typed.log_dir or folder
        os.environ["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] = LABEL
        yield
