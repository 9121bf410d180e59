"""The messages that the processes of a run exchange, and their version.

A rank speaks with the agent of its machine, the agent with the kernel, the kernel with the
template. Two lives are told apart: that of a rank process (``Launch``, ``RankReady``,
``Shutdown``, ``RankEnded``) and that of a call, which ranks that are ready run (``BeginCall``,
``CallStarted``, ``Returned`` or ``Raised``). A call has a number, which is on every message about
it; what comes late for an old call is dropped by whoever gets it.

In the kernel (``control/``) a message from an agent comes to four places, each of which sorts it:

    pool.py _take -> state.py apply_to_processes     what it changes of the rank processes
                  -> pool.py _pass_between_agents    what the other agents must know of it
                  -> call.py take                    results, metrics and stacks of the call
                       -> state.py apply             what it changes of the call, as views draw it

A message that a rank sends has ``from_rank`` and is sent by launch/rank.py; the agent passes it on.

Bytes of a connection are decoded into the types below and nothing else (transport/channel.py):
none is ever unpickled on the way. Values of the user's (arguments, results, exceptions) pass as
opaque bytes, and whoever asks for them unpickles them later.
"""

from __future__ import annotations

import os
import time
from typing import ClassVar, TypeVar

import msgspec

__all__ = [
    "AgentExited",
    "AgentReady",
    "Alive",
    "Bar",
    "BeginCall",
    "CallEnded",
    "CallStarted",
    "CountDevices",
    "Credit",
    "Data",
    "Detach",
    "Devices",
    "Displayed",
    "DumpStacks",
    "EndMachineAgent",
    "ForkAgent",
    "Forked",
    "Interrupt",
    "Kill",
    "Launch",
    "LeaveAt",
    "LogOpened",
    "M",
    "MachineAgentEnded",
    "MachineAgentStarted",
    "MachineJoined",
    "MachineRefused",
    "MasterSocket",
    "Message",
    "Metric",
    "Metrics",
    "Notice",
    "Output",
    "Packet",
    "PortReserved",
    "Raised",
    "RankEnded",
    "RankFailed",
    "RankReady",
    "RankSpec",
    "Returned",
    "Sample",
    "Shutdown",
    "RunSnapshot",
    "Stacks",
    "StartMachineAgent",
    "Stop",
    "StopPointReached",
    "StreamOpened",
    "TemplateReady",
    "Terminate",
    "VERSION",
]

# Both ends of a connection compare it before the first message (transport/handshake.py). Raise it
# with every change of a message: the kernel and its template may be of two versions.
VERSION = 11


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base class of all messages, with the fields that every message carries.

    Attributes:
        run: id of the run that started the rank processes; in a session that of the session,
            whatever call the message is about.
        call: number of the call that the message is about, from 1 on; 0 where it is about
            processes.
        process: pid of the sender.
        rank: the rank that the message is about, None for a whole machine.
        monotonic: the sender's ``time.monotonic()``, seconds.
        wall: the sender's ``time.time()``, seconds.
        from_rank: whether a rank may send messages of this class at any time; its agent drops
            others, those that end a call aside.
    """

    from_rank: ClassVar[bool] = False

    run: str = ""
    call: int = 0
    process: int = msgspec.field(default_factory=os.getpid)
    rank: int | None = None
    monotonic: float = msgspec.field(default_factory=time.monotonic)
    wall: float = msgspec.field(default_factory=time.time)


class Packet(msgspec.Struct, frozen=True, kw_only=True):
    """A pickled value as a message carries it, inline or in a memory segment sent along.

    ``transport/segment.py`` converts values to packets and back.

    Attributes:
        sizes: length in bytes of each out-of-band buffer.
        inline: the buffers themselves; empty where they lie in a segment that goes along.
    """

    sizes: tuple[int, ...] = ()
    inline: tuple[bytes, ...] = ()


# ---- from a rank ---------------------------------------------------------------------------


class RankReady(Message, frozen=True, kw_only=True):
    """From a rank: its environment is set up, and it waits for calls.

    Attributes:
        pid: of its process, where that is not the one which the agent started; else 0.
        host: the rank whose file takes the stacks of this process: with ranks that are threads, the
            first of them; None for this one.
    """

    from_rank: ClassVar[bool] = True

    pid: int = 0
    host: int | None = None


class CallStarted(Message, frozen=True, kw_only=True):
    """From a rank: it is about to call the function."""

    from_rank: ClassVar[bool] = True


class Metric(Message, frozen=True, kw_only=True):
    """Values given to ``accelerator.log``. The agent passes them on as :class:`Metrics`."""

    from_rank: ClassVar[bool] = True

    values: dict[str, float]
    step: int | None = None


class Bar(Message, frozen=True, kw_only=True):
    """The state of one progress bar. ``rate`` in items/s, ``elapsed`` in seconds.

    ``bar`` numbers the bars of the rank; ``postfix`` is what the bar shows after its numbers
    ("loss=0.31").
    """

    from_rank: ClassVar[bool] = True

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
    """Rich output that a rank displayed, by MIME type; binary data in base64, as in Jupyter.

    Attributes:
        data: what is shown.
        display_id: by which it may be replaced later; "" where it may not.
        replaces: whether it only takes the place of what was displayed by that id.
    """

    from_rank: ClassVar[bool] = True

    data: dict[str, str]
    display_id: str = ""
    replaces: bool = False


class Notice(Message, frozen=True, kw_only=True):
    """One line for the person, shown once however many ranks send it."""

    from_rank: ClassVar[bool] = True

    text: str


class Returned(Message, frozen=True, kw_only=True):
    """The function returned. A file descriptor comes along if the buffers are not inline.

    Attributes:
        value: what it returned.
        is_none: whether that was None.
        made_group: whether a process group was made in this call, or was there before it.
        lost_group: whether the rank was disconnected from the others: the group is of no use.
    """

    value: Packet
    is_none: bool = False
    made_group: bool = False
    lost_group: bool = False


class Raised(Message, frozen=True, kw_only=True):
    """The function raised an exception on this rank.

    Attributes:
        kind: "exception", "exit" (SystemExit), "interrupted" (KeyboardInterrupt), "stopped"
            (RunStopped) or "lost peer".
        type_name: name of the exception's class.
        text: ``str(exception)``.
        traceback: formatted, with the cells' own names and lines.
        exitcode: what the process ends with, if this was its last call.
        pickled: the exception, where it could be pickled.
        rescued: this rank's part of the training, where the call was stopped or interrupted.
        made_group: as in :class:`Returned`.
        ended_by_agent: whether its agent had interrupted it because another rank failed.
        after_interrupt: whether the agent had already sent SIGINT, SIGTERM or SIGKILL when the
            rank raised, by the clock of its machine. The agent sets both.
    """

    kind: str
    type_name: str
    text: str
    traceback: str
    exitcode: int = 1
    pickled: bytes | None = None
    rescued: Packet | None = None
    made_group: bool = False
    ended_by_agent: bool = False
    after_interrupt: bool = False


# ---- from an agent -------------------------------------------------------------------------


class AgentReady(Message, frozen=True, kw_only=True):
    """The agent has forked its rank processes; ``pids`` maps each rank to its pid."""

    pids: dict[int, int]


class Alive(Message, frozen=True, kw_only=True):
    """Heartbeat that the agent sends every few seconds; silence means that it is held up."""


class PortReserved(Message, frozen=True, kw_only=True):
    """The agent with rank 0 has begun the call, and reserved this port for its ranks to meet.

    The kernel sends the call to the other agents then.
    """

    port: int


class LogOpened(Message, frozen=True, kw_only=True):
    """Announces a remote rank's output, whose bytes follow as the stream of this number."""

    stream: int


class RankFailed(Message, frozen=True, kw_only=True):
    """A rank of the call failed; the kernel tells the other agents, which end the call there."""


class StopPointReached(Message, frozen=True, kw_only=True):
    """Answer to ``Stop``: the highest stop points that ranks of this agent have passed.

    Its fields are those of ``StopPoint`` in transport/scoreboard.py, which explains a stop.
    """

    batches: int
    reads: int
    reads_should_stop: bool


class Metrics(Message, frozen=True, kw_only=True):
    """Values that the ranks of an agent logged, in the order of arrival at the agent.

    Ranks may log thousands of times a second. If each value were a message of its own, it would
    cost the agent a write, and the kernel a turn of its thread.
    """

    metrics: tuple[Metric, ...]


class Output(Message, frozen=True, kw_only=True):
    """New output of a rank, printed in the message's call.

    Attributes:
        text: the newest part of it.
        skipped: number of lines before that part, which are in the rank's file only.
        start, end: bytes of the file between which all of it lies, the skipped lines included.
    """

    text: str
    skipped: int = 0
    start: int = 0
    end: int = 0


class Sample(Message, frozen=True, kw_only=True):
    """Resource use and counters of a rank; ``RankState`` (control/state.py) explains the fields.

    Memory in bytes, ``cpu`` and ``device_use`` in percent of a core and of the device's time.
    """

    batches: int = 0
    total_batches: int | None = None
    pass_start: int = 0
    steps: int = 0
    memory: int | None = None
    device_memory: int | None = None
    cpu: int | None = None
    device_use: int | None = None
    device: str = ""
    is_suspended: bool = False


class RankEnded(Message, frozen=True, kw_only=True):
    """A rank's process ended and was reaped.

    Attributes:
        exitcode, signal: how it ended; one of them is None.
        ended_by_agent: whether its agent sent SIGTERM or SIGKILL.
        after_interrupt: as in :class:`Raised`, for the end of the process.
    """

    exitcode: int | None = None
    signal: int | None = None
    ended_by_agent: bool = False
    after_interrupt: bool = False


class Stacks(Message, frozen=True, kw_only=True):
    """Stack traces of a rank's threads, as faulthandler writes them."""

    text: str


# ---- to an agent, and from it to its ranks -------------------------------------------------


class RankSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One rank that an agent starts: its numbers, environment and device.

    Attributes:
        rank: its number among all ranks of the run.
        local_rank: its number among those of the agent.
        environment: variables of this rank alone, which win over those of all ranks.
        device: index of its accelerator among those that it sees; None: its local rank.
    """

    rank: int
    local_rank: int
    environment: dict[str, str] = {}
    device: int | None = None


class Launch(Message, frozen=True, kw_only=True):
    """Request to an agent: start the rank processes, which then wait for calls.

    Attributes:
        world_size: number of ranks of the run.
        ranks: ranks that this agent starts, in the order of their local ranks.
        environment: complete environment of every rank.
        directory: current directory of the ranks.
        path: ``sys.path`` of the ranks.
        log_dir: folder of the files with the ranks' output; None where the agent does not see the
            kernel's files: it keeps them in a folder of its own, and sends their bytes.
        num_threads: what each rank gives to ``torch.set_num_threads``.
        start_method: how the agent brings rank processes about (a name in agent.py's table).
        notebook: state that cells set up beside variables (a pickle of payload/notebook_state.py).
    """

    world_size: int
    ranks: tuple[RankSpec, ...]
    environment: dict[str, str]
    directory: str
    path: tuple[str, ...]
    log_dir: str | None
    num_threads: int
    start_method: str = "fork"
    notebook: bytes = b""


class BeginCall(Message, frozen=True, kw_only=True):
    """Request: call a function on every rank. A descriptor comes along for buffers in a segment.

    It is sent to ranks that have ended the call before, by the kernel to the agent and by the
    agent to its ranks.

    Attributes:
        payload: the function, its arguments and what the notebook sends with it.
        grace: seconds that handlers of a KeyboardInterrupt get.
        last: whether the rank processes end after it, as after a ``Shutdown``.
        keeps_error: whether what it raises stays in the rank, for a debugger.
        by_value: whether the notebook's classes and functions come back by value, for a kernel
            that lacks them.
        group_generation: how many calls of the session failed or cut a rank off. Where it has
            grown, each rank destroys the process group that it has before it runs the call.
        master_port: the ranks' MASTER_PORT; for 0, the agent of rank 0 fills in one that it has
            reserved.
    """

    payload: Packet
    grace: float
    last: bool = False
    keeps_error: bool = False
    by_value: bool = False
    group_generation: int = 0
    master_port: int = 0


class MasterSocket(Message, frozen=True, kw_only=True):
    """Gives rank 0 the socket bound to MASTER_PORT, as a file descriptor, for its stores.

    The agent sends it to rank 0 before the first call for which the port is new.
    """


class Shutdown(Message, frozen=True, kw_only=True):
    """Request: end the rank processes after their current call; no more calls come."""


class Stop(Message, frozen=True, kw_only=True):
    """Request: stop the call politely, with all ranks leaving at the same step.

    Ranks that are still in the call after ``grace`` seconds (None: the call's own), or after
    one second without progress, are interrupted. Where all have left their loop or have read
    ``should_stop``, none is: they go on until somebody asks again.
    """

    grace: float | None = None


class LeaveAt(Message, frozen=True, kw_only=True):
    """Tells each rank at which count to leave, once all agents have answered a ``Stop``.

    The fields of ``LeavePoint`` in transport/scoreboard.py.
    """

    batches: int | None
    reads: int


class CallEnded(Message, frozen=True, kw_only=True):
    """Tells agents that every rank's part of the call has ended, on all machines."""


class Interrupt(Message, frozen=True, kw_only=True):
    """Request: raise KeyboardInterrupt in every rank that is in the call."""


class Terminate(Message, frozen=True, kw_only=True):
    """Request: send SIGTERM to every rank process that is in the call, or shuts down."""


class Kill(Message, frozen=True, kw_only=True):
    """Request: SIGKILL every rank process that is in the call or shuts down, and its children.

    With call 0, or the number of a call that has not reached the agent yet, it ends all rank
    processes.
    """


class DumpStacks(Message, frozen=True, kw_only=True):
    """Request: send ``Stacks`` for the message's rank, or for all ranks."""


# ---- with the keeper of a detached run (launch/keeper.py); it takes Stop, Kill and DumpStacks, too


class Detach(Message, frozen=True, kw_only=True):
    """Request to a keeper: launch this run. A descriptor comes along if buffers are not inline.

    Attributes:
        request: the pickled launch request, from the process that started the keeper.
        payload: the function and its arguments.
    """

    request: bytes
    payload: Packet


class RunSnapshot(Message, frozen=True, kw_only=True):
    """State of a detached run, from its keeper; ``state`` is a ``RunState``.

    The other fields are those of its ``Call``.
    """

    state: bytes
    timeout: float | None = None
    timed_out: bool = False
    rescued_as: str = ""


# ---- with a template -----------------------------------------------------------------------


class TemplateReady(Message, frozen=True, kw_only=True):
    """From the template: it has imported all that it preloads."""


class ForkAgent(Message, frozen=True, kw_only=True):
    """Request to the template: fork an agent; its end of the run's channel comes along."""

    secret: bytes


class Forked(Message, frozen=True, kw_only=True):
    """Answer to :class:`ForkAgent`: the agent's pid, or in ``error`` why none was forked."""

    pid: int = 0
    error: str = ""


class AgentExited(Message, frozen=True, kw_only=True):
    """An agent's process ended; ``exitcode`` is negative for a signal."""

    pid: int
    exitcode: int


class CountDevices(Message, frozen=True, kw_only=True):
    """Request: count the accelerators that a process with this environment sees."""

    environment: dict[str, str]


class Devices(Message, frozen=True, kw_only=True):
    """Answer to ``CountDevices``: the fields of ``Inventory`` in training/processes/devices.py.

    ``error`` says why they could not be counted; "" where they could.
    """

    kind: str
    names: tuple[str, ...] = ()
    memory: tuple[int, ...] = ()
    versions: dict[str, str] = {}
    problem: str = ""
    error: str = ""


# ---- of a channel to another machine (transport/frames.py) ---------------------------------


class StreamOpened(Message, frozen=True, kw_only=True):
    """Announces a stream of bytes: a memory segment of a later message, or a growing file.

    The segment stands in for the descriptor of that message; a file belongs to no message.

    Attributes:
        stream: its number among the streams of the sender.
        size: of the segment, in bytes; None for a file that grows.
    """

    stream: int
    size: int | None = None


class Data(Message, frozen=True, kw_only=True):
    """The next bytes of a stream; ``last`` marks its end."""

    stream: int
    data: bytes
    last: bool = False


class Credit(Message, frozen=True, kw_only=True):
    """Allows the sender of a stream to send ``size`` more bytes."""

    stream: int
    size: int


# ---- between the notebook and another machine (transport/machine_link.py) ------------------


class MachineJoined(Message, frozen=True, kw_only=True):
    """A machine offers itself for ranks: its versions, environment and devices.

    Attributes:
        host: its name.
        python, torch: versions; functions travel as bytecode, so that Python's must be one.
        environment: variables of the process that joins.
        directory: its current directory.
        path: its ``sys.path``.
        num_cores: that it may use.
        interface: the network interface by which it reaches the notebook; "" where unknown.
        devices: its accelerators, by their names.
        num_ranks: how many ranks whoever had it join gives it; 0 where the notebook decides.
    """

    host: str
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
    """The notebook refuses the machine that joined; ``text`` says why."""

    text: str


class StartMachineAgent(Message, frozen=True, kw_only=True):
    """Request to a machine: start an agent, to which the bytes that follow go.

    ``directory`` is that of its ranks, if the machine has it.
    """

    directory: str


class EndMachineAgent(Message, frozen=True, kw_only=True):
    """Request to a machine: end its agent, and wait for the next request."""


class MachineAgentStarted(Message, frozen=True, kw_only=True):
    """Answer to ``StartMachineAgent``: the ranks' directory, or why there is no agent."""

    directory: str = ""
    error: str = ""


class MachineAgentEnded(Message, frozen=True, kw_only=True):
    """The agent of a machine has ended: the fields of ``AgentEnd`` in control/agent_link.py."""

    how: str
    traceback: str = ""


M = TypeVar("M", bound=Message)
