"""The messages that the processes of a run exchange, and the version of this protocol.

A rank talks with the agent of its machine (the process that started the rank), the agent talks with
the kernel, and the kernel with the template (the process that forks agents). Some messages are
about the rank processes (``Launch``, ``RankReady``, ``Shutdown``, ``RankEnded``). Others are about
one call of a function on ranks that are ready (``BeginCall``, ``CallStarted``, ``Returned`` or
``Raised``). Each call has a number, which is on every message about it; a receiver drops a message
that comes too late, about an older call.

In the kernel (launch/control/) a message from an agent passes three functions, each of which uses
some of its fields:

    pool.py _take -> run_state.py apply_to_processes what it changes of the rank processes
                  -> common_actions.py take          how far an agent's ranks are with an action
                  -> call.py take                    results, metrics and stacks of the call
                       -> run_state.py apply         what it changes of the call, as views draw it

Ranks send messages of the classes in ``FROM_RANK``, mostly through rank/this_rank.py, and report
the end of a call with ``Returned`` or ``Raised``. The agent passes these messages on to the kernel.

The bytes of a connection are decoded into the types below and nothing else (transport/channel.py):
no message is unpickled. The user's values (arguments, results, exceptions) pass as opaque bytes;
the process for which they are meant unpickles them when it needs them.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

# A template says it first, and a machine as it joins: the other side compares it. Raise it with
# every change of a message: a kernel and the processes that it starts may be of two versions.
VERSION = 27


# What a knob may hold.
KnobValue = bool | int | float | str


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base class of all messages, with the fields that every message carries.

    Attributes:
        run: id of the run that started the rank processes; in a session, of the session.
        call: number of the call that the message is about, from 1 on; 0 for a message about the
            rank processes.
        monotonic: the sender's ``time.monotonic()``, seconds.
        wall: the sender's ``time.time()``, seconds.
    """

    run: str = ""
    call: int = 0
    process: int = msgspec.field(default_factory=os.getpid)
    rank: int | None = None
    monotonic: float = msgspec.field(default_factory=time.monotonic)
    wall: float = msgspec.field(default_factory=time.time)


class Packet(msgspec.Struct, frozen=True, kw_only=True):
    """A pickled value in the form that messages carry: inline, or in a memory segment sent along.

    ``launch/payload`` converts values to packets and back.

    Attributes:
        sizes: length in bytes of each buffer of the pickle.
    """

    sizes: tuple[int, ...] = ()
    inline: tuple[bytes, ...] = ()


# ---- from a rank ---------------------------------------------------------------------------


class RankReady(Message, frozen=True, kw_only=True):
    """From a rank: its environment is set up, and it waits for calls.

    Attributes:
        host: the rank into whose file the process writes its stacks: on TPUs, where ranks are
            threads, the first rank of the process.
    """

    host: int = 0


class CallStarted(Message, frozen=True, kw_only=True):
    """From a rank: it is about to call the function."""


class Metric(Message, frozen=True, kw_only=True):
    """From a rank: values given to ``accelerator.log``.

    Its agent collects these messages, and passes them on as :class:`Metrics`.

    Attributes:
        step: the step that the values belong to; None for no step.
    """

    values: dict[str, float]
    step: int | None = None


class Bar(Message, frozen=True, kw_only=True):
    """From a rank: the state of one progress bar."""

    bar: int
    name: str
    n: float
    total: float | None = None
    rate: float | None = None
    elapsed: float = 0.0
    unit: str = "it"
    postfix: str = ""
    closed: bool = False


class Displayed(Message, frozen=True, kw_only=True):
    """From a rank: rich output that it displayed, such as a figure."""

    data: dict[str, str]
    display_id: str = ""
    replaces: bool = False
    clears: bool = False


class Notice(Message, frozen=True, kw_only=True):
    """A line for the user; a line with the same text is shown only once in a call.

    Attributes:
        kind: "line"; from a rank also "warning" (a Python warning that it has shown) or
            "training" (device, precision and strategy of the training).
    """

    text: str
    kind: str = "line"


class Imported(Message, frozen=True, kw_only=True):
    """From rank 0, at the end of a call: modules of libraries that it had to import itself."""

    names: tuple[str, ...]


class Frame(NamedTuple):
    """One frame of a stack: file name, line number and function name."""

    file: str
    line: int
    function: str


class Collective(msgspec.Struct, frozen=True, kw_only=True):
    """A collective that a rank has begun, as torch's flight recorder has it.

    Attributes:
        ranks: of the group; () for all.
        peer: the other rank of a send or receive; None for what all ranks of the group take part
            in.
    """

    group: str
    ranks: tuple[int, ...] = ()
    number: int
    peer: int | None = None
    operation: str
    sizes: str = ""
    is_pending: bool
    frames: tuple[Frame, ...] = ()


class Collectives(Message, frozen=True, kw_only=True):
    """From a rank whose agent was asked for stacks: its newest collectives."""

    begun: tuple[Collective, ...] = ()


class Returned(Message, frozen=True, kw_only=True):
    """From a rank: the function returned.

    A file descriptor comes along if the buffers of ``value`` are not inline.

    Attributes:
        is_none: whether the function returned None.
    """

    value: Packet
    is_none: bool = False
    made_group: bool = False
    lost_group: bool = False


class Raised(Message, frozen=True, kw_only=True):
    """From a rank: the function raised an exception.

    Attributes:
        kind: "exception", "exit" (SystemExit), "interrupted" (KeyboardInterrupt), "stopped"
            (RunStopped) or "lost peer" (torch raised an error because another rank has ended).
        pickled: the pickled exception; None if it could not be pickled.
    """

    kind: str
    type_name: str
    text: str
    traceback: str = ""
    exitcode: int = 1
    pickled: bytes | None = None
    rescued: Packet | None = None
    made_group: bool = False
    ended_by_agent: bool = False
    after_interrupt: bool = False


# ---- from an agent -------------------------------------------------------------------------


class AgentReady(Message, frozen=True, kw_only=True):
    """From an agent: it has started its rank processes; ``pids`` maps each rank to its pid."""

    pids: dict[int, int]


class Alive(Message, frozen=True, kw_only=True):
    """From an agent: a heartbeat, every two seconds, so that the kernel notices a stuck agent.

    A kernel that has launched a detached run sends this message to the keeper, too, to say that it
    has the run's id.
    """


class PortReserved(Message, frozen=True, kw_only=True):
    """From the agent with rank 0, by the kernel to the others: the MASTER_PORT of a new call.

    The other agents hold the call, and what comes after it, until they have this message. Only
    ``Kill`` is not held, since it ends the ranks in any case.
    """

    port: int


class RankFailed(Message, frozen=True, kw_only=True):
    """From an agent: one of its ranks failed in the call."""


class KnobMade(Message, frozen=True, kw_only=True):
    """From rank 0: the function has made a knob, or the knob has a new value."""

    name: str
    value: KnobValue
    low: float | None = None
    high: float | None = None
    log: bool = False
    choices: tuple[KnobValue, ...] = ()


class Saved(Message, frozen=True, kw_only=True):
    """From rank 0: a checkpoint was written, whose folder is complete."""

    folder: str


class Metrics(Message, frozen=True, kw_only=True):
    """From an agent: values that its ranks logged, in the order of arrival at the agent.

    Ranks may log thousands of times a second. A message for each value would cost the agent a write
    per value, and the kernel a turn of its thread.
    """

    metrics: tuple[Metric, ...]


class Output(Message, frozen=True, kw_only=True):
    """From an agent: new output that a rank has printed in the call with number ``call``.

    Attributes:
        start, end: offsets in bytes of the new output, with the skipped lines, in the log file.
    """

    text: str
    skipped: int = 0
    start: int = 0
    end: int = 0


class StepTimes(msgspec.Struct, frozen=True):
    """Where the time of a rank's steps goes: sums over the last minute or so, in nanoseconds."""

    num_steps: int = 0
    total: int = 0
    data: int = 0
    forward: int = 0
    backward: int = 0
    optimizer: int = 0
    rest: int = 0
    collectives: int = 0
    data_wait: int = 0


_NO_STEPS = StepTimes()


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Counters and resource use of a rank; their names are those of the scoreboard or the gauges.

    Attributes:
        total_batches: number of batches in the current pass through the loader; None if unknown.
        pass_start: value of ``batches`` at the start of this pass, so that ``batches - pass_start``
            is the progress in the pass. Negative after a resume in the middle of a pass.
        memory, device_memory: bytes of memory that the rank's process uses, and bytes that are used
            on the rank's device; None if unknown.
        device_peak, device_limit: the most bytes that torch has used on the device so far, and how
            many it could use, other processes aside; None if unknown.
        cpu, device_use: CPU use in percent of one core, and the percentage of the time in which the
            device was busy; None if unknown.
        device: name of the device that the rank computes on; "" if unknown.
    """

    batches: int = 0
    total_batches: int | None = None
    pass_start: int = 0
    steps: int = 0
    memory: int | None = None
    device_memory: int | None = None
    device_peak: int | None = None
    device_limit: int | None = None
    step_times: StepTimes = _NO_STEPS
    cpu: int | None = None
    device_use: int | None = None
    device: str = ""
    is_suspended: bool = False


class Sample(Message, frozen=True, kw_only=True):
    """From an agent: counters and resource use of a rank."""

    usage: Usage


class RankEnded(Message, frozen=True, kw_only=True):
    """From an agent: a rank's process ended and was reaped.

    Attributes:
        exitcode: exit code of the process; None if a signal killed it.
        signal: number of the signal that killed the process; None if no signal did.
        stack: what ``faulthandler`` wrote of a crash in native code; "" for other ends.
    """

    exitcode: int | None = None
    signal: int | None = None
    stack: str = ""
    ended_by_agent: bool = False
    after_interrupt: bool = False


class Stacks(Message, frozen=True, kw_only=True):
    """Answer to ``DumpStacks``: the traces of a rank's threads, in the format of faulthandler."""

    text: str


# ---- to an agent, and from it to its ranks -------------------------------------------------


class Launch(Message, frozen=True, kw_only=True):
    """Request to an agent: start the rank processes, which then wait for calls.

    Attributes:
        ranks: the numbers of this agent's ranks, in the order of their local ranks.
        log_dir: folder of the ranks' log files. None if the agent's machine does not see the
            kernel's files: the agent then writes logs to a folder of its own, and sends the bytes.
        num_threads: number of threads that each rank gives to ``torch.set_num_threads``.
        start_method: how the agent makes rank processes: "fork", or "xla" for ranks on TPUs.
    """

    world_size: int
    ranks: tuple[int, ...]
    environment: dict[str, str]
    directory: str
    path: tuple[str, ...]
    log_dir: str | None
    num_threads: int
    start_method: str = "fork"


class BeginCall(Message, frozen=True, kw_only=True):
    """Request to an agent, and from it to each of its ranks: call a function.

    It is sent once the ranks have ended the previous call. A descriptor comes along if the buffers
    of ``payload`` are in a memory segment.

    Attributes:
        master_port: the ranks' MASTER_PORT; 0 if the agent of rank 0 is to fill in a port that it
            has reserved.
        resume: folder of the checkpoint with which the training begins; "" if it begins anew.
        knobs: values with which knobs begin.
    """

    payload: Packet
    grace: float
    resume: str = ""
    knobs: dict[str, KnobValue] = {}
    last: bool = False
    keeps_error: bool = False
    by_value: bool = False
    group_generation: int = 0
    master_port: int = 0


class MasterSocket(Message, frozen=True, kw_only=True):
    """From an agent to rank 0: the socket bound to MASTER_PORT, on which the rank serves stores."""


class Shutdown(Message, frozen=True, kw_only=True):
    """Request to an agent and its ranks: end the rank processes after their current call."""


class Stop(Message, frozen=True, kw_only=True):
    """Request to an agent: end the call, with all ranks leaving it at the same batch.

    A step that is under way is let finish. Ranks without progress are interrupted, and after
    ``grace`` seconds (None stands for the ``grace`` of the call) also ranks that go on and do not
    come to a batch or a read of ``should_stop``. Once all ranks have left their loop or have read
    ``should_stop``, no rank is interrupted before a second ``Stop``.
    """

    grace: float | None = None


class CallEnded(Message, frozen=True, kw_only=True):
    """From the kernel to all agents: every rank on every machine has ended its part of the call.

    A rank that returns earlier keeps its connections open until this message comes, five seconds
    at most, since other ranks may still read from them.
    """


class Interrupt(Message, frozen=True, kw_only=True):
    """Request to an agent: raise KeyboardInterrupt in every rank that is in the call."""


class Terminate(Message, frozen=True, kw_only=True):
    """Request to an agent: SIGTERM the rank processes that are in the call or shutting down."""


class Kill(Message, frozen=True, kw_only=True):
    """Request to an agent: SIGKILL the rank processes and their children.

    Only ranks that are in the call or shutting down are killed. If ``call`` is 0, or the number of
    a call that has not reached the agent yet, all ranks are killed.
    """


class DumpStacks(Message, frozen=True, kw_only=True):
    """Request to an agent: send ``Stacks`` of ``rank``, or of all ranks if it is None."""


# ---- how all ranks do one thing at one point (actions/scoreboard.py) ---------------------------


@dataclass(frozen=True, kw_only=True)
class Point:
    """Where all ranks act: the first batch, read or step with such a number, counted from 1.

    Attributes:
        batches, reads, begun, saves: counts of batches, reads of ``should_stop``, optimizer steps
            without a loader, and reads of ``should_save``; 0 for points at which nobody acts.
    """

    batches: int = 0
    reads: int = 0
    begun: int = 0
    saves: int = 0


@dataclass(frozen=True, kw_only=True)
class Passed(Point):
    """An agent's answer to a request: the highest counts at which any of its ranks went on."""

    reads_should_stop: bool = False


NOWHERE = Point()


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """What all ranks do at one common point of their training (actions/scoreboard.py).

    Attributes:
        kind: what is done, by a word of ``rank/this_rank.py`` (``_acts``).
        folder: where the state for a clone goes, or that of a save which the function leaves to us.
    """

    kind: str
    values: dict[str, KnobValue] = {}
    folder: str = ""


class PointReached(Message, frozen=True, kw_only=True):
    """From an agent, in answer to ``Stop``, ``Act`` or ``Hold``: how far its ranks have come.

    From the answers of all agents the kernel chooses a later point, at which all ranks act
    (:class:`ActAt`); actions/scoreboard.py explains how.

    Attributes:
        number: of the action; ``scoreboard.STOP`` for a stop.
        refused: why this machine cannot do the action; "" if it can.
        did: whether a rank has begun the action, or may have.
        misses: whether a rank in the call has not begun it.
    """

    number: int
    passed: Passed = Passed()
    refused: str = ""
    did: bool = False
    misses: bool = False


class ActionDone(Message, frozen=True, kw_only=True):
    """From an agent: its ranks have done the action, or have ended their part of the call."""

    number: int
    num_ranks: int


class PauseEnded(Message, frozen=True, kw_only=True):
    """From an agent: its ranks train again after a pause."""


class Act(Message, frozen=True, kw_only=True):
    """Request to an agent: have all ranks do an action at a common point of their training."""

    number: int
    content: bytes


class ActAt(Message, frozen=True, kw_only=True):
    """From the kernel to all agents, after all have answered ``Stop`` or ``Act``: where ranks act.

    ``NOWHERE`` withdraws the action, or ends a pause.
    """

    number: int
    point: Point


class Hold(Message, frozen=True, kw_only=True):
    """Request to an agent: let no rank begin the action, until the next ``ActAt``."""

    number: int


# ---- with the keeper of a detached run (launch/keeper.py) --------------------------------------


class Detach(Message, frozen=True, kw_only=True):
    """Request to a keeper, from the kernel that started it: launch this detached run."""

    request: bytes
    payload: Packet


# ---- with a template -----------------------------------------------------------------------


class TemplateReady(Message, frozen=True, kw_only=True):
    """From the template: it has imported what all ranks need, and can fork agents."""

    version: int = 0


class ForkAgent(Message, frozen=True, kw_only=True):
    """Request to the template: fork an agent, which gets the socket that comes along.

    Attributes:
        is_remote: whether the agent's kernel is on another machine.
    """

    is_prepared: bool = False
    is_remote: bool = False


class Forked(Message, frozen=True, kw_only=True):
    """Answer to a request to fork: the new process's pid, or in ``error`` why there is none."""

    pid: int = 0
    error: str = ""


class AgentExited(Message, frozen=True, kw_only=True):
    """From the template: an agent's process ended; ``exitcode`` is -9 if signal 9 killed it."""

    pid: int
    exitcode: int


class ImportItem(msgspec.Struct, frozen=True):
    """``import module``, or ``from module import names``; a name "*" is left out."""

    module: str
    names: tuple[str, ...] = ()

    @property
    def root(self) -> str:
        return self.module.partition(".")[0]


class Import(Message, frozen=True, kw_only=True):
    """To a template: import these, in the background."""

    items: tuple[ImportItem, ...]
    environment: dict[str, str]
    path: tuple[str, ...]


class Importing(Message, frozen=True, kw_only=True):
    """From a prepared template, before the import of ``item``, and after one that went wrong.

    Attributes:
        item: None once all items of a message are imported.
        problem: what the import left behind, such as a thread, so that the process must not fork
            ranks.
        error: the exception that the import raised.
        files: once all are imported, time of the last change of each file, in nanoseconds.
    """

    item: ImportItem | None = None
    problem: str = ""
    error: str = ""
    files: dict[str, int] = {}


class AskImports(Message, frozen=True, kw_only=True):
    """Request to the template for the progress of its imports."""


class Imports(Message, frozen=True, kw_only=True):
    """Answer to :class:`AskImports`.

    Attributes:
        pid: of the prepared template; 0 if there is none.
        importing: the library for whose import a launch should wait now; "" for none.
        problem: why there is no prepared template; "" if nothing speaks against it.
    """

    pid: int = 0
    importing: str = ""
    libraries: tuple[str, ...] = ()
    left_out: dict[str, str] = {}
    problem: str = ""


class CountDevices(Message, frozen=True, kw_only=True):
    """Request to the template: count the accelerators that a process with this environment sees."""

    environment: dict[str, str]


class Devices(Message, frozen=True, kw_only=True):
    """Answer to ``CountDevices``: the accelerators.

    Attributes:
        memory: total memory of each accelerator in bytes, 0 if unknown; empty if all are unknown.
        problem: why torch can use no accelerator, such as an old driver; "" if torch gives no
            reason.
        error: why the accelerators could not be counted; "" if they were.
    """

    kind: str
    names: tuple[str, ...] = ()
    memory: tuple[int, ...] = ()
    versions: dict[str, str] = {}
    problem: str = ""
    error: str = ""


# ---- of a channel to another machine (transport/frames.py) ---------------------------------


class Data(Message, frozen=True, kw_only=True):
    """Bytes to another machine, to which no file descriptor can be sent.

    They are the next bytes of the log of ``rank``, or without a rank those of a memory segment
    that a message brings; ``last`` marks the end of the file or segment.
    """

    data: bytes
    last: bool = False


# ---- between the notebook and another machine (transport/machine_link.py) ------------------


class MachineJoined(Message, frozen=True, kw_only=True):
    """From a machine that offers itself for ranks: its versions, environment and devices.

    Attributes:
        interface: the network interface by which the machine reaches the notebook; "" if unknown.
        num_ranks: number of ranks that the machine is to have; 0 if the notebook decides.
    """

    host: str
    user: str
    python: str
    torch: str
    environment: dict[str, str]
    directory: str
    path: tuple[str, ...]
    num_cores: int
    interface: str
    devices: tuple[str, ...] = ()
    num_ranks: int = 0


class MachineRefused(Message, frozen=True, kw_only=True):
    """From the notebook: it refuses the machine that joined; ``text`` says why."""

    text: str


class MachineReleased(Message, frozen=True, kw_only=True):
    """From the notebook: it needs the machine no longer; the connection ends soon after.

    Attributes:
        outcome: what the run has come to: "succeeded", "failed", "stopped", or "ended" for a
            session.
    """

    outcome: str


class StartMachineAgent(Message, frozen=True, kw_only=True):
    """Request to a machine that joined: start an agent, and pass it all bytes that follow."""

    directory: str
    environment: dict[str, str]
    path: tuple[str, ...] = ()
    imports: tuple[ImportItem, ...] = ()


class EndMachineAgent(Message, frozen=True, kw_only=True):
    """Request to a machine that joined: end its agent; the machine then awaits more requests."""


class MachineAgentStarted(Message, frozen=True, kw_only=True):
    """Answer to ``StartMachineAgent``: an agent was started, or could not be."""

    directory: str = ""
    error: str = ""


class MachineAgentEnded(Message, frozen=True, kw_only=True):
    """From a machine that joined: its agent has ended."""

    how: str
    traceback: str = ""


# What a rank may send at any time. During a call it may also send Returned or Raised; its agent
# drops messages of other classes.
FROM_RANK = (
    *(RankReady, CallStarted, Metric, Bar, Displayed, Notice, Imported, Collectives),
    *(KnobMade, Saved),
)

M = TypeVar("M", bound=Message)


class Post(Protocol):
    """Sends the other side a message of this class, with these fields, about one call."""

    def __call__(self, kind: type[Message], /, **fields: Any) -> None: ...
