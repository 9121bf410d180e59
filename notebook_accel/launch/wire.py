"""What processes say to each other: the messages, their encoding and its version.

A rank speaks with the agent of its machine, the agent with the kernel, the kernel with the
template. All of it is msgpack, decoded into the types below and nothing else: no byte of a
connection is ever unpickled here. Values of the user's (arguments, results, exceptions) pass as
opaque bytes, and whoever asks for them unpickles them later.
"""

from __future__ import annotations

import os
import time
from typing import Any, TypeVar, Union

import msgspec

__all__ = [
    "VERSION",
    "AgentExited",
    "AgentReady",
    "Bar",
    "CountDevices",
    "Credit",
    "Data",
    "Devices",
    "DumpStacks",
    "ForkAgent",
    "Forked",
    "Interrupt",
    "Kill",
    "Launch",
    "Message",
    "Metric",
    "Notice",
    "Output",
    "Packet",
    "Raised",
    "RankEnded",
    "RankStarted",
    "Returned",
    "Sample",
    "Stacks",
    "Stop",
    "StreamOpened",
    "TemplateReady",
    "Terminate",
    "decode",
    "encode",
]

VERSION = 1


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What every message carries.

    Attributes:
        run: id of the run.
        attempt: how often the run was restarted before.
        generation: counts the process groups (and session cells) of a run.
        process: pid of the sender.
        rank: the rank that the message is about, None for a whole machine.
        sequence: counts the sender's messages.
        monotonic: the sender's ``time.monotonic()``, seconds.
        wall: the sender's ``time.time()``, seconds.
    """

    run: str = ""
    attempt: int = 0
    generation: int = 0
    process: int = msgspec.field(default_factory=os.getpid)
    rank: int | None = None
    sequence: int = 0
    monotonic: float = msgspec.field(default_factory=time.monotonic)
    wall: float = msgspec.field(default_factory=time.time)


class Packet(msgspec.Struct, frozen=True, kw_only=True):
    """A pickled value, in the message or in a memory segment beside it.

    ``transport/packet.py`` makes it of a value, and the value of it.

    Attributes:
        header: the pickle; empty where it is too large for a message, and the first buffer then.
        sizes: length in bytes of each out-of-band buffer.
        inline: the buffers themselves; empty where they lie in a segment that goes along.
    """

    header: bytes
    sizes: tuple[int, ...] = ()
    inline: tuple[bytes, ...] = ()


# ---- from a rank ---------------------------------------------------------------------------


class RankStarted(Message, frozen=True, kw_only=True):
    """The rank is about to call the function."""


class Metric(Message, frozen=True, kw_only=True):
    """Values given to ``accelerator.log``."""

    values: dict[str, float]
    step: int | None = None


class Bar(Message, frozen=True, kw_only=True):
    """The state of one progress bar. ``rate`` in items/s, ``elapsed`` in seconds.

    ``postfix`` is what the bar shows after its numbers ("loss=0.31").
    """

    bar: int
    name: str
    n: float
    total: float | None = None
    rate: float | None = None
    elapsed: float = 0.0
    unit: str = "it"
    postfix: str = ""
    closed: bool = False


class Notice(Message, frozen=True, kw_only=True):
    """One line for the person, shown once, whatever rank said it first."""

    text: str


class Returned(Message, frozen=True, kw_only=True):
    """The function returned. A file descriptor goes along where the buffers are not inline."""

    value: Packet
    is_none: bool = False
    made_group: bool = False
    drew_bar: bool = False


class Raised(Message, frozen=True, kw_only=True):
    """The function raised.

    Attributes:
        kind: "exception", "exit" (SystemExit), "interrupted" (KeyboardInterrupt), "stopped"
            (RunStopped) or "lost peer".
        type_name: name of the exception's class.
        text: ``str(exception)``.
        traceback: formatted, with the cells' own names and lines.
        exitcode: what the process ends with.
        pickled: the exception, where it could be pickled.
    """

    kind: str
    type_name: str
    text: str
    traceback: str
    exitcode: int = 1
    pickled: bytes | None = None
    made_group: bool = False


# ---- from an agent -------------------------------------------------------------------------


class AgentReady(Message, frozen=True, kw_only=True):
    """The ranks were forked."""

    pids: tuple[int, ...]
    port: int


class Output(Message, frozen=True, kw_only=True):
    """New output of a rank: the newest part of it; ``skipped`` lines before it stay on disk."""

    text: str
    skipped: int = 0


class Sample(Message, frozen=True, kw_only=True):
    """What a rank's counters say now. Memory in bytes."""

    batches: int = 0
    total_batches: int | None = None
    pass_start: int = 0
    steps: int = 0
    memory: int | None = None
    device_memory: int | None = None


class RankEnded(Message, frozen=True, kw_only=True):
    """A rank's process ended and was reaped; ``ours``: its agent had ended it."""

    exitcode: int | None = None
    signal: int | None = None
    ours: bool = False


class Stacks(Message, frozen=True, kw_only=True):
    """Where the Python of a rank stands."""

    text: str


# ---- to an agent ---------------------------------------------------------------------------


class Launch(Message, frozen=True, kw_only=True):
    """Start the ranks. The payload's segment comes along as a file descriptor.

    Attributes:
        world_size: number of ranks of the run.
        ranks: the global ranks that this agent starts.
        environment: of every rank, whole.
        directory: current directory of the ranks.
        path: ``sys.path`` of the ranks.
        log_dir: folder of the files with the ranks' output.
        num_threads: what each rank gives to ``torch.set_num_threads``.
        payload: the function, its arguments and what the notebook sends with it.
        imports: modules that each rank imports first.
        grace: seconds that handlers of a KeyboardInterrupt get.
    """

    world_size: int
    ranks: tuple[int, ...]
    environment: dict[str, str]
    directory: str
    path: tuple[str, ...]
    log_dir: str
    num_threads: int
    payload: Packet
    imports: tuple[str, ...] = ()
    grace: float = 10.0


class Stop(Message, frozen=True, kw_only=True):
    """Leave politely: at the same step on all ranks; harder after ``grace`` seconds."""

    grace: float | None = None


class Interrupt(Message, frozen=True, kw_only=True):
    """KeyboardInterrupt in every rank."""


class Terminate(Message, frozen=True, kw_only=True):
    """SIGTERM to every rank."""


class Kill(Message, frozen=True, kw_only=True):
    """SIGKILL to every rank and all their children."""


class DumpStacks(Message, frozen=True, kw_only=True):
    """Send ``Stacks`` for the message's rank, or for all."""


# ---- with a template -----------------------------------------------------------------------


class TemplateReady(Message, frozen=True, kw_only=True):
    """The template has imported what it preloads."""


class ForkAgent(Message, frozen=True, kw_only=True):
    """Fork an agent; its end of the run's channel comes along as a file descriptor."""

    secret: bytes


class Forked(Message, frozen=True, kw_only=True):
    """An agent was forked; ``error`` says why not, where it was not."""

    pid: int = 0
    error: str = ""


class AgentExited(Message, frozen=True, kw_only=True):
    """An agent's process ended. Negative exit codes are signals."""

    pid: int
    exitcode: int


class CountDevices(Message, frozen=True, kw_only=True):
    """Ask which accelerators a process with this environment sees."""

    environment: dict[str, str]


class Devices(Message, frozen=True, kw_only=True):
    """The accelerators: their torch type ("cuda", or "cpu" for none) and names."""

    kind: str
    names: tuple[str, ...] = ()


# ---- of a channel to another machine (transport/frames.py) ---------------------------------


class StreamOpened(Message, frozen=True, kw_only=True):
    """The bytes of a file begin to come, which the next message has as a descriptor.

    Attributes:
        stream: its number among the streams of the sender.
        size: in bytes; None for a file that grows, which is no descriptor of a message.
    """

    stream: int
    size: int | None = None


class Data(Message, frozen=True, kw_only=True):
    """The next bytes of a stream; ``last`` where no more come."""

    stream: int
    data: bytes
    last: bool = False


class Credit(Message, frozen=True, kw_only=True):
    """The receiver has room for ``size`` more bytes of a stream."""

    stream: int
    size: int


_Any = Union[
    RankStarted,
    Metric,
    Bar,
    Notice,
    Returned,
    Raised,
    AgentReady,
    Output,
    Sample,
    RankEnded,
    Stacks,
    Launch,
    Stop,
    Interrupt,
    Terminate,
    Kill,
    DumpStacks,
    TemplateReady,
    ForkAgent,
    Forked,
    AgentExited,
    CountDevices,
    Devices,
    StreamOpened,
    Data,
    Credit,
]

M = TypeVar("M", bound=Message)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(_Any)


def encode(message: Message) -> bytes:
    """The bytes of one message. Half characters, as of file names that are no text, are spelled."""
    try:
        return _encoder.encode(message)
    except UnicodeEncodeError:
        fields = _spelled(msgspec.structs.asdict(message))
        return _encoder.encode({"type": type(message).__name__, **fields})


def _spelled(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_spelled(name): _spelled(part) for name, part in value.items()}
    return [_spelled(part) for part in value] if isinstance(value, tuple) else value


def decode(data: bytes | memoryview) -> Message:
    """The message in ``data``.

    Raises:
        msgspec.DecodeError: the bytes are no message of this version.
    """
    return _decoder.decode(data)
