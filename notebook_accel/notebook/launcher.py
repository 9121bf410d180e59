"""``notebook_launcher``: check its arguments, pick the view of the run, and launch it."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import fields, replace
from functools import partial, wraps
from pathlib import Path
from types import MappingProxyType
from typing import Any, Concatenate, ParamSpec

from IPython.core.getipython import get_ipython

from notebook_accel.config import LaunchConfig, given_settings, resolve
from notebook_accel.config.checks import as_count, as_flag, shown
from notebook_accel.errors import ConfigError, WorkerError
from notebook_accel.launch import run_list
from notebook_accel.launch.engines import engine_for
from notebook_accel.launch.engines.elastic import join, parse_address
from notebook_accel.launch.launch_request import LaunchRequest
from notebook_accel.launch.launcher import folder_to_resume, launch
from notebook_accel.launch.run import Run
from notebook_accel.launch.text import wording
from notebook_accel.notebook import tracebacks
from notebook_accel.notebook.cell_setup import read_setup
from notebook_accel.notebook.clicks import find_kernel
from notebook_accel.notebook.display_slot import DisplaySlot
from notebook_accel.notebook.session import session_for
from notebook_accel.notebook.views import choose_view, dashboard_in

P = ParamSpec("P")
# Fields of the next request: set in the thread of a sweep, which launches nothing but trials.
trial_to_launch: ContextVar[Mapping[str, Any]] = ContextVar(
    "trial_to_launch", default=MappingProxyType({})
)

# The fields of LaunchConfig; those that are arguments of the launcher too have the same names.
_SETTINGS = [field.name for field in fields(LaunchConfig)]


def _with_given_arguments(
    launcher: Callable[Concatenate[Mapping[str, Any], P], Run],
) -> Callable[P, Run]:
    """Decorate ``launcher`` to get, as its first argument, the arguments that the caller wrote.

    A written argument wins over ``config=`` even where it equals the default.
    """
    parameters = list(inspect.signature(launcher).parameters.values())[1:]
    signature = inspect.Signature(parameters, return_annotation="Run")

    @wraps(launcher)
    def call(*args: P.args, **kwargs: P.kwargs) -> Run:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            unknown = [name for name in kwargs if name not in signature.parameters]
            meant = wording.did_you_mean("".join(unknown[:1]), signature.parameters)
            raise ConfigError(f"{launcher.__name__}(): {error}{meant}") from None
        return launcher(given, *args, **kwargs)

    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


@_with_given_arguments
def notebook_launcher(
    given: Mapping[str, Any],
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str | None = None,
    use_port: int | str | None = None,
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int | str = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Mapping[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    config: LaunchConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    engine: str = "auto",
    devices: Sequence[int] | str | None = None,
    env: Mapping[str, str] | None = None,
    session: bool = False,
    debug: bool = False,
    join_token: str | None = None,
    block: bool = True,
    detach: bool = False,
    view: str = "auto",
    timeout: float | None = None,
    grace: float = LaunchConfig.grace,
    name: str | None = None,
    resume: Run | str | os.PathLike[str] | None = None,
) -> Run:
    """Call ``function(*args, **kwargs)`` on every rank of a new run, and show the run live.

    The names and the order of the first arguments are those of Hugging Face Accelerate.

    Args:
        function: what each rank calls; defined in the notebook or imported. ``run[r]`` is what rank
            r returned.
        args: its positional arguments.
        num_processes: number of ranks on each machine. None: one for each visible accelerator, 1 on
            a machine without accelerators.
        mixed_precision: "no", "bf16", "fp16" or "fp8", for each ``Accelerator`` that the function
            makes without giving it ``mixed_precision``.
        use_port: MASTER_PORT of the ranks; None takes a free one. A session in which a call has
            failed takes a free one in any case. With several machines, the port of machine 0 at
            which the others join.
        master_addr: with several machines, the address at which the others reach machine 0.
        node_rank: number of this machine; 0 in the notebook that launches. Another machine joins by
            running the same cell with its own number and with the ``join_token`` that the
            notebook shows. On that machine the call returns None once the run has ended.
        num_nodes: number of machines. The call shows a command (``notebook-accel join``), by which
            the others join, and waits for them before the run begins. On a node of a Slurm job
            it has ``srun`` start that command on other nodes of the job.
        rdzv_backend: accepted for compatibility, not used.
        rdzv_endpoint: ``HOST:PORT``, in place of ``master_addr`` and ``use_port``.
        rdzv_conf: accepted for compatibility, not used.
        rdzv_id: accepted for compatibility, not used.
        max_restarts: how often the ranks are started again after a failure. A function that begins
            with ``accelerator.resume_or_start(dir)`` continues from its checkpoint.
        monitor_interval: accepted for compatibility, not used.
        log_line_prefix_template: accepted for compatibility, not used.
        kwargs: the function's keyword arguments.
        config: settings for the arguments that are left out: a ``LaunchConfig``, a mapping of its
            fields, or the path of a YAML file.
        engine: where the ranks run. "auto" takes several machines if the other arguments ask for
            them, a TPU if the machine has one, else processes of this machine. "inline" runs the
            function in the notebook's own process, for a debugger; ``help(LaunchConfig)`` lists
            all engines.
        devices: indices of the accelerators to use, one rank each, or "cpu".
        env: environment variables of the ranks, in addition to those of the notebook.
        session: call the function on the ranks of the ``%%accelerate`` session, which stay alive
            between calls; they are started if there is no session. Globals in the function are
            then the variables of those ranks.
        debug: check that all ranks give matching arguments to the collectives of ``Accelerator``.
            If a rank fails while the cell waits, all ranks are kept, so that ``%accelerate
            debug`` can look into its frames. The ranks end with the next launch, or with
            ``%accelerate stop``. Torch's own mode (TORCH_DISTRIBUTED_DEBUG=DETAIL) is not turned
            on: it kills ranks that train by DDP on CPUs.
        join_token: token of the launch that this machine joins (``node_rank``). It is valid
            until all machines of the launch have joined.
        block: wait for the end of the run. False returns at once; ``run.wait()`` or ``run[0]``
            wait.
        detach: with ``block=False``, the run continues when the kernel ends or restarts, until the
            function returns or you stop it. ``attach(run.id)`` in any later kernel returns the
            run's handle. A result whose class the notebook defines comes with a copy of that class.
        view: "auto" (a live panel where a person watches, plain lines elsewhere), "widgets", "text"
            or "none".
        timeout: seconds after which the run is ended; None for no limit.
        grace: seconds that ranks have to end by themselves: after Stop until they are interrupted,
            and after an interrupt until they are terminated.
        name: name of the run in its panel, in ``runs()`` and in ``compare``. None: the name of
            the function.
        resume: where the training goes on: a run (from where it was stopped, else from the newest
            checkpoint that it wrote), or a folder of checkpoints. ``resume_or_start`` returns this
            start, and a function that does not call it has it loaded before its first batch.
            Settings of the optimizer that the function gives anew win.

    Returns:
        The run: results, logs, metrics and progress, while it runs and afterwards.

    Raises:
        ConfigError: an argument is invalid; nothing was started.
        LaunchError: the run could not start.
        WorkerError: a rank failed. The message has its traceback.
        RunStopped: the run was stopped before it had a result.
        TimeoutError: ``timeout`` ended the run.
        KeyboardInterrupt: the cell was interrupted; raised once the ranks have ended.

    With ``block=False``, ``run.wait()`` raises the last four. Errors have the run as ``error.run``,
    if there is one.

    Example:
        >>> from notebook_accel import Accelerator, notebook_launcher
        >>> def train(rate):
        ...     accelerator = Accelerator()
        ...     return rate, accelerator.process_index, accelerator.num_processes
        >>> run = notebook_launcher(train, args=(0.1,), num_processes=2)
        >>> run[1]
        (0.1, 1, 2)
    """
    changed = _not_default(given)
    if "node_rank" in changed:
        with tracebacks.show_in_short():
            _join_as_node(given)
        # There is no run here: results are in the notebook of machine 0.
        return None  # type: ignore[return-value]
    if "join_token" in changed:
        raise ConfigError("join_token is for the other machines (node_rank above 0): leave it out")
    settings = settings_of(given)
    if name is not None and (session or not isinstance(name, str) or not name.strip()):
        expected = (
            "no name with session=True, since the calls of a session are named by their functions"
            if session
            else "a text, as lr=0.1"
        )
        raise ConfigError(f"name={shown(name)}: expected {expected}")
    _check_detach(detach, session=session)
    tracebacks.end_held_launch()
    resumed = "" if resume is None else folder_to_resume(resume)
    ranks = None
    if session:
        with tracebacks.show_in_short():
            ranks = session_for(_notebook_shell(), settings, config)
        chosen, notices = ranks.config, list[str]()
    else:
        chosen, notices = resolve(settings, config)
    if resumed and "block" in engine_for(chosen).unused:
        raise ConfigError(
            f"resume= with engine={chosen.engine!r}: call accelerator.load_state({resumed!r}) in "
            "the function instead"
        )
    steps, lost = read_setup(get_ipython())
    with tracebacks.show_in_short():
        request = LaunchRequest(
            function=function,
            args=args,
            kwargs={} if kwargs is None else kwargs,
            config=chosen,
            view=choose_view(view, waits=block),
            sources=tracebacks.cell_sources(get_ipython()),
            setup=steps,
            block=block,
            timeout=timeout,
            notices=(*notices, *_unused(changed, chosen), *lost),
            name=name or "",
            detach=detach,
            resume=resumed,
            origin=_origin(resume, resumed),
            # That of a form has one place.
            new_view=partial(choose_view, view if isinstance(view, str) else "auto"),
        )
        request = replace(request, **trial_to_launch.get())
        if ranks is not None:
            return ranks.call(request)
        # Where the ranks can wait for a debugger, and somebody for them.
        can_hold = block and get_ipython() is not None and engine_for(chosen).starts_ranks
        if can_hold and given_settings(settings, config)[0].get("debug"):
            return tracebacks.launch_for_debugger(request)
        try:
            return launch(request)
        except WorkerError as error:
            if can_hold and error.traceback:
                error.hint = tracebacks.HINT_TO_DEBUG
            raise


def launch_below(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    config: LaunchConfig,
    slot: DisplaySlot,
) -> Run:
    """As :func:`notebook_launcher` with ``block=False``, shown in a slot: a click has no output.

    Raises:
        ConfigError, LaunchError: as a launch; also by :func:`check_leaves_notebook_free`.
    """
    check_leaves_notebook_free(resolve({}, config)[0])
    view: Any = dashboard_in(find_kernel(), waits=False, slot=slot)
    return notebook_launcher(function, args, kwargs=kwargs, config=config, block=False, view=view)


def check_leaves_notebook_free(config: LaunchConfig) -> None:
    """Refuse, by ConfigError, an engine that runs in the notebook: a click has no cell for it."""
    if "block" in engine_for(config).unused:
        raise ConfigError(
            f"engine={config.engine!r} runs the function in the cell that launches it, and a click "
            "has none: copy the code into a cell"
        )


# ---- arguments -----------------------------------------------------------------------------


def _not_default(given: Mapping[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(notebook_launcher).parameters
    changed = dict(given)
    for name, value in given.items():
        with suppress(Exception):  # arrays compare with nothing as a whole
            if value == parameters[name].default:
                del changed[name]
    return changed


def settings_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given fields of ``LaunchConfig``, converted; ConfigError for a bad endpoint."""
    settings = {name: given[name] for name in _SETTINGS if name in given}
    for name in ("num_nodes", "use_port"):  # Accelerate's own default is the text "29500"
        if name in settings:
            settings[name] = _as_number(settings[name])
    is_default = "master_addr" not in _not_default(given)
    if is_default and settings.get("num_nodes", 1) == 1:
        settings.pop("master_addr", None)
    if given.get("rdzv_endpoint"):
        settings["master_addr"], settings["use_port"] = parse_address(given["rdzv_endpoint"])
    if isinstance(settings.get("mixed_precision"), str):
        # Accelerate's launcher takes "FP16", too.
        settings["mixed_precision"] = settings["mixed_precision"].lower()
    return settings


def _join_as_node(given: Mapping[str, Any]) -> None:
    """Join the launch of machine 0; return when the run has ended."""
    node_rank = as_count("node_rank", given["node_rank"], least=0)
    num_nodes = as_count("num_nodes", _as_number(given.get("num_nodes", 1)))
    endpoint = given.get("rdzv_endpoint") or ":".join(
        str(given.get(name, "")) for name in ("master_addr", "use_port")
    )
    if node_rank >= num_nodes:
        raise ConfigError(
            f"node_rank={node_rank} with num_nodes={num_nodes}: machines are numbered from 0 to "
            f"{num_nodes - 1}, and the notebook is machine 0"
        )
    if not given.get("join_token"):
        raise ConfigError(
            f"node_rank={node_rank}: this machine joins the launch of another one. Take join_token="
            " and rdzv_endpoint='HOST:PORT' from the command that the notebook of machine 0 shows"
        )
    join(endpoint, given["join_token"])


def _as_number(value: Any) -> Any:
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def _origin(resume: object, folder: str) -> str:
    """Return the id of the run that goes on: of a folder, the newest here that wrote into it."""
    if not folder or isinstance(resume, Run):
        return resume.id if isinstance(resume, Run) else ""
    wrote = {run.id: Path(run.state.checkpoint) for run in run_list.runs() if run.state.checkpoint}
    found = [run for run, path in wrote.items() if Path(folder) in (path, *path.parents)]
    return found[-1] if found else ""


def _check_detach(detach: object, *, session: bool) -> None:
    if as_flag("detach", detach) and session:
        raise ConfigError(
            "detach=True with session=True: the ranks of a session end with the kernel. Leave one "
            "of them out"
        )


def _notebook_shell() -> Any:
    shell = get_ipython()
    if shell is None:
        raise ConfigError(
            "session=True: ranks stay between the cells of a notebook, and this code runs in none; "
            "leave it out"
        )
    return shell


def _unused(given: Mapping[str, Any], config: LaunchConfig) -> list[str]:
    """Return a notice that lists the settings which the chosen engine ignores, if any."""
    chosen = engine_for(config)
    names = [name for name in {**given, **config.to_dict()} if name in chosen.unused]
    if not names:
        return []
    verb = "is" if len(names) == 1 else "are"
    return [f"{', '.join(names)} {verb} not used by {chosen.description}"]


def debug_launcher(
    function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2
) -> Run:
    """Call ``function(*args)`` on several CPU processes, in full precision and with ``debug=True``.

    Environment variables and the default config file cannot change device, precision or ``debug``.

    Args:
        function: what each rank calls.
        args: its positional arguments.
        num_processes: number of ranks.

    Returns:
        The run, which has ended.

    Raises:
        WorkerError: a rank failed. ConfigError, LaunchError, RunStopped and KeyboardInterrupt are
            raised as by ``notebook_launcher``.

    Example:
        >>> from notebook_accel import Accelerator, debug_launcher
        >>> def train():
        ...     return Accelerator().num_processes
        >>> run = debug_launcher(train)
        >>> run.results
        [2, 2]
    """
    return notebook_launcher(
        function, args, num_processes, mixed_precision="no", devices="cpu", debug=True
    )
