"""The rank processes of a run or session, in the kernel, and the thread that listens to them.

    RankCall (one per call) --BeginCall, Stop, ...--> RankPool --channels--> agents --> ranks
    RankCall <--messages about its call-- RankPool <--channels-- agents <-- ranks

An agent is the helper process that starts and watches the ranks of one machine. The pool holds the
only connections to the agents. Its thread keeps the states of the rank processes, passes messages
about the running call to that call, and calls its ``tick`` several times a second. The thread ends
when all rank processes have ended; those of a lost agent count as ended.

Agents have no connection to each other, so the pool tells them what they must know of each other:
the MASTER_PORT of the process group, which the agent of rank 0 chooses, that a rank has failed, and
that every rank's part of a call has ended. At which point all ranks stop or do another action, the
call's ``actions`` tell them (common_actions.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec

from notebook_accel import wire
from notebook_accel.actions.common_actions import CommonActions
from notebook_accel.errors import LaunchError
from notebook_accel.launch.control.run_state import ProcessState, RunState, apply_to_processes
from notebook_accel.launch.text.wording import rank_list
from notebook_accel.launch.transport.channel import Channel, ProtocolError
from notebook_accel.system.interrupts import Latch, held
from notebook_accel.system.own_files import open_log
from notebook_accel.system.processes import describe_exit, is_readable

_log = logging.getLogger(__name__)

# While a call runs: views draw five times a second, and time-outs are told in seconds.
_TICK_SECONDS = 0.1
# Between calls there is nothing to draw, and messages wake the thread.
_IDLE_SECONDS = 1.0
# The agent itself gives a rank five seconds to write its stacks.
_STACKS_SECONDS = 10.0
# Between two looks at whether the stacks have come.
_POLL_SECONDS = 0.01
# An agent that was told to kill and does not answer is killed itself; its ranks go with it.
_DEAF_SECONDS = 3.0
# An agent sends a word every two seconds. One that stays silent is killed once somebody has wanted
# the end for `_SILENT_SECONDS`; where nobody wants it, the person is told, since it may go on.
_SILENT_SECONDS = 10.0
_TELL_SILENCE_SECONDS = 20.0


@dataclass(frozen=True)
class AgentEnd:
    """How an agent's process (the helper that watches the ranks of a machine) ended, in words.

    Attributes:
        ranks: the ranks that were lost with it, if any of them still ran.
        traceback: traceback of the exception that ended the agent; "" if there was none.
        likely: the likely cause, as a clause; "" lets the error name the usual cause of a SIGKILL
            (out of memory, or killed by somebody).
    """

    how: str
    traceback: str = ""
    likely: str = ""
    ranks: tuple[int, ...] = ()

    @classmethod
    def of_own_failure(cls, error: Exception, run: str) -> AgentEnd:
        """Return the ``AgentEnd`` of an agent that is killed since the kernel's own code failed."""
        _log.warning("run %s cannot be conducted", run, exc_info=error)
        how = f"was ended, since notebook_accel itself failed ({type(error).__name__}: {error})"
        return cls(how, "".join(traceback.format_exception(error)))


@dataclass(frozen=True, kw_only=True)
class AgentLink:
    """The notebook kernel's connection to one agent of a run, with functions to end the agent.

    An agent is the helper process that starts and watches the ranks of one machine. The engine
    makes a link for each agent that it starts; the ``RankPool`` of the run uses it.

    Attributes:
        how_it_ended: waits at most some seconds for the end of the agent's process, and returns how
            the process ended; None if unknown.
    """

    channel: Channel
    ranks: tuple[int, ...]
    how_it_ended: Callable[[], AgentEnd | None]
    kill: Callable[[], None]
    launch_fields: Mapping[str, Any] = field(default_factory=dict)

    def post(self, message: wire.Message, fds: Sequence[int] = ()) -> None:
        """Send a message to the agent without blocking.

        What the socket cannot take now stays queued; the thread of the ``RankPool`` writes it
        later. If the agent is gone, that thread notices it, and no error is raised here.

        Raises:
            OSError: this process may open no more file descriptors; nothing was sent.
        """
        self.channel.post(message, fds)
        with contextlib.suppress(OSError, ValueError):
            self.channel.flush(block=False)

    def end(self) -> None:
        """Kill the agent and its ranks; an error is logged, not raised, so that the run can end."""
        try:
            self.kill()
        except Exception:  # whatever the system refuses, the run must end
            _log.warning("the agent of %s could not be ended", self.ranks, exc_info=True)


class RunningCall(Protocol):
    """What a pool uses of the call that its ranks run; :class:`RankCall` implements it."""

    number: int
    state: RunState
    actions: CommonActions

    @property
    def is_over(self) -> bool: ...
    def begin(self, number: int) -> None: ...
    def take(self, message: wire.Message, fds: Sequence[int]) -> None: ...
    def lose(self, ranks: Sequence[int]) -> None: ...
    def tick(self) -> None: ...
    def note_stop(self) -> bool: ...
    def finish(self, lost: Sequence[AgentEnd]) -> None: ...


class RankPool:
    """The rank processes of a run or session, reached through their agents; one call at a time.

    An agent is the helper process that starts and watches the ranks of one machine.

    Engines make pools. The public methods may be called from any thread; most private ones run in
    the pool's own thread, which listens to the agents.

    Attributes:
        is_awaited: whether there are no ranks yet (engines/local.py).
    """

    is_awaited = False

    def __init__(
        self, links: Sequence[AgentLink], *, run: str, grace: float, log_dir: Path
    ) -> None:
        """Make the pool; its agents run already, but have started no ranks.

        The caller then has each agent start its ranks (``wire.Launch``), and starts the thread
        that listens to the agents (:meth:`start`).
        """
        self.run = run
        self.grace = grace
        self.processes = tuple(
            ProcessState(rank=rank, agent=index)
            for index, link in enumerate(links)
            for rank in link.ranks
        )
        self.ended = Latch()
        # Those that are not lost; only the pool's thread takes one out.
        self._links = list(links)
        self._all_links = tuple(links)
        for link in links:
            link.channel.open_log = partial(open_log, log_dir)
        # Guards what callers' threads and the pool's own thread both change, and the channels;
        # nothing is done under it that may block. Reentrant, since a finalizer that ends a session
        # or a run may be called in a thread that holds it.
        self._lock = threading.RLock()
        # Messages to be sent. One that a finalizer sends in a thread that is just using the
        # channels waits here until that use is over.
        self._unsent: deque[tuple[Sequence[AgentLink], wire.Message, Sequence[int]]] = deque()
        self._uses_channels = False
        # Held by the pool's thread while it handles messages and draws: to take it pauses the pool.
        self._turn = threading.Lock()
        self._call: RunningCall | None = None
        self._num_calls = 0
        self._group_generation = 0
        self._is_shutting_down = False
        self._lost: list[AgentEnd] = []
        self._kill_asked: float | None = None
        # The newest dump of each rank, and when it came.
        self._stacks: dict[int, tuple[float, str]] = {}
        # Whether the agent of rank 0 has yet to name the port of the call, which the others await.
        self._awaits_port = False
        self._end_asked: float | None = None  # when the call's end was asked for first
        self._has_announced_end = False  # whether agents were told of the call's end
        self._selector = selectors.DefaultSelector()  # not in the thread: it may fail
        self._thread = threading.Thread(target=self._serve, name=f"ranks-{run}", daemon=True)

    def start(self) -> None:
        try:
            self._thread.start()
        except RuntimeError as error:
            for link in list(self._links):
                self._lose(link, AgentEnd(f"could not be listened to ({error})"))
            self._finish()
            raise LaunchError(
                f"no thread could be started to listen to the ranks: {error}. End other processes "
                "or threads of yours (`ulimit -u` says how many there may be), then launch again."
            ) from error

    def await_agents(self) -> None:
        """Wait until all agents have ended, but at most a few seconds for each.

        Called after all ranks have ended, and before they are restarted: an agent removes temporary
        files of the run when it ends, and must not remove those of the new ranks.
        """
        for link in self._all_links:
            link.how_it_ended()

    # ---- calls -----------------------------------------------------------------------------

    def send_call(self, call: RunningCall, message: wire.BeginCall, fds: Sequence[int]) -> None:
        """Send a call to all ranks; the pool's thread then passes their messages to ``call``."""
        with held(), self._lock:
            self.check_free()
            self._num_calls += 1
            message = msgspec.structs.replace(
                message, run=self.run, call=self._num_calls, group_generation=self._group_generation
            )
            self._is_shutting_down = message.last
            has_several = len(self._all_links) > 1
            self._has_announced_end = not has_several
            self._awaits_port = has_several
            self._call = call
            call.begin(self._num_calls)
            try:
                # Where an agent is dead already, the pool's thread will notice and end the call.
                self.send(message, fds)
            except OSError:
                self._call = None
                call.begin(0)
                if has_several:  # some may have heard of it
                    self._send_kill()
                raise

    def check_free(self) -> None:
        """Raise an error if no call can be sent now; the error says why."""
        dead = "; ".join(
            f"rank {process.rank} {describe_exit(process.exitcode, process.signal)}"
            for process in self.processes
            if process.status == "ended"
        )
        if self._call is not None:
            raise LaunchError(
                "the ranks are still in a call: wait for it (run.wait()) or stop it (run.stop())"
            )
        if self._lost:
            how = self._lost[0].how
            raise LaunchError(f"the helper process that watches the ranks {how}: start them again")
        if dead:
            raise LaunchError(f"{dead}. What the ranks had is lost: start them again")
        if self._is_shutting_down:
            raise LaunchError("the ranks were told to end: start them again")

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Pause the listening thread within the block.

        Messages from ranks wait meanwhile. A call is sent and its run opened in such a block, so
        that no message of a rank is handled before the run exists.
        """
        with held(), self._turn:
            yield

    @property
    def is_in_call(self) -> bool:
        return self._call is not None

    # ---- what anybody may ask ----------------------------------------------------------------

    def send(
        self, message: wire.Message, fds: Sequence[int] = (), to: Sequence[AgentLink] | None = None
    ) -> None:
        """Send a message to agents, all if ``to`` is None."""
        with held(), self._lock:
            self._unsent.append((list(self._links) if to is None else to, message, fds))
            if not self._uses_channels:
                self._send_unsent()

    @contextlib.contextmanager
    def _channels(self) -> Iterator[None]:
        """Lock the channels within the block; messages sent within the block go out at its end."""
        with self._lock:
            self._uses_channels = True
            try:
                yield
            finally:
                self._send_unsent()

    def _send_unsent(self) -> None:
        # Never blocks, so that a stop gets through to the others where one agent is frozen: the
        # pool's thread writes what a socket does not take now.
        self._uses_channels = True
        try:
            while self._unsent:
                links, message, fds = self._unsent.popleft()
                for link in links:
                    link.post(message, fds)
        finally:
            self._uses_channels = False

    def ask_end(self, kind: type[wire.Message], /, *, call: int, **fields: Any) -> None:
        """Send agents a request to end the call of this number: a Stop, Interrupt or Terminate.

        Does nothing once that call has ended.
        """
        with held(), self._lock:
            if not self._is_in(call):
                return
            self._end_asked = self._end_asked or time.monotonic()
        self.send(kind(run=self.run, call=call, **fields))

    def agents(self) -> Iterator[tuple[int, ...]]:
        """Return the agents that are not lost, each by the numbers of its ranks."""
        return (link.ranks for link in list(self._links))

    def shut_down(self) -> None:
        """Let the rank processes end after their current call, and refuse further calls."""
        with held(), self._lock:
            self._is_shutting_down = True
            self.send(wire.Shutdown(run=self.run))

    def kill(self, *, call: int = 0) -> None:
        """Have agents send SIGKILL to the ranks in the call of this number; with 0, to all ranks.

        Does nothing if ``call`` is the number of a call that has ended. If the ranks have not ended
        3 seconds later, all agents are killed as well.
        """
        with held():
            with self._lock:
                # If all are killed, the pool's thread must not end the call before the processes
                # have ended: `_end_call` would forget that the kill was asked for.
                self._is_shutting_down |= call == 0
                running = self._call if call == 0 else None
            if running is not None:
                running.note_stop()  # without our lock: who holds the call's may wait for ours
            with self._lock:
                if call == 0 or self._is_in(call):
                    self._send_kill(call)

    def _send_kill(self, call: int = 0) -> None:
        self._kill_asked = self._kill_asked or time.monotonic()
        self.send(wire.Kill(run=self.run, call=call))

    def _is_in(self, call: int) -> bool:
        return self._call is not None and self._call.number == call

    def stacks(self, rank: int | None = None) -> list[tuple[int, str]]:
        """Ask ranks for their stacks, and wait up to 10 seconds for them."""
        asked = time.monotonic()
        chosen = [number for number in range(len(self.processes)) if rank in (None, number)]

        def answer(number: int) -> str | None:
            if self.processes[number].status == "ended":
                return "the rank has ended\n"
            came, text = self._stacks.get(number, (0.0, ""))
            return text if came >= asked else None

        if None in map(answer, chosen):
            self.send(wire.DumpStacks(run=self.run, rank=rank))
        # Without a lock: an interrupt of whoever waits must not hold up the pool's thread.
        while None in map(answer, chosen) and time.monotonic() < asked + _STACKS_SECONDS:
            time.sleep(_POLL_SECONDS)
        silence = f"its agent gave no answer within {_STACKS_SECONDS:g} s\n"
        return [(number, answer(number) or silence) for number in chosen]

    # ---- the thread ------------------------------------------------------------------------

    def _serve(self) -> None:
        with self._selector as selector:
            for link in self._links:
                selector.register(link.channel.fileno(), selectors.EVENT_READ, link)
            # Until all rank processes have ended and their last output has arrived.
            while any(process.status != "ended" for process in self.processes) or any(
                link.channel.is_receiving for link in self._links
            ):
                is_idle = self._call is None and self._kill_asked is None
                for link in self._links:
                    # Wakes when a full socket can take more.
                    pending = selectors.EVENT_WRITE if link.channel.num_pending else 0
                    selector.modify(link.channel.fileno(), selectors.EVENT_READ | pending, link)
                events = selector.select(_IDLE_SECONDS if is_idle else _TICK_SECONDS)
                with self._turn:
                    for link in [key.data for key, _ in events]:
                        self._hear(selector, link)
                    try:
                        self._tick()
                    except Exception as error:  # nobody else would ever end these ranks
                        end = AgentEnd.of_own_failure(error, self.run)
                        for link in list(self._links):
                            self._lose(link, end)
        self._finish()

    def _hear(self, selector: selectors.BaseSelector, link: AgentLink) -> None:
        try:
            self._take_all(link)
            if link.channel.has_ended:
                # Above, the good messages were taken; this raises what ended the channel. It is
                # not left to the next turn: after nonsense, no byte may ever wake the selector.
                self._take_all(link)
        except EOFError as error:
            end = link.how_it_ended() or AgentEnd(f"was lost ({error})")
        except ProtocolError as error:
            end = AgentEnd(f"said what could not be understood ({error})")
        except Exception as error:  # nobody else would ever end these ranks
            end = AgentEnd.of_own_failure(error, self.run)
        else:
            return
        selector.unregister(link.channel.fileno())
        self._lose(link, end)

    def _take_all(self, link: AgentLink) -> None:
        with self._channels():
            try:
                messages = link.channel.drain()
            except OSError as error:
                # Only an error of reading means that the agent is gone; that a message cannot be
                # kept (below) is a failure of this process.
                raise EOFError(str(error)) from error
            with contextlib.suppress(OSError):
                link.channel.flush(block=False)
        problem: Exception | None = None
        for message, fds in messages:
            try:
                self._take(link, message, fds)
            except Exception as error:  # the messages after it may be a result, or the end
                problem = problem or error
        if problem is not None:
            raise problem

    def _take(self, link: AgentLink, message: wire.Message, fds: list[int]) -> None:
        with contextlib.ExitStack() as unwanted:
            for fd in fds:
                unwanted.callback(os.close, fd)
            self.processes = apply_to_processes(message, self.processes)
            call = self._call
            if isinstance(message, wire.Stacks) and message.rank is not None:
                self._stacks[message.rank] = time.monotonic(), message.text
            elif isinstance(message, wire.Output) and message.rank in link.channel.logs:
                # Of a rank on another machine, whose log here may begin with an attempt before.
                before = link.channel.logs[message.rank].start
                message = msgspec.structs.replace(
                    message, start=message.start + before, end=message.end + before
                )
            # Messages about processes bear the number 0, and concern every call.
            if call is not None and message.call in (0, call.number):
                if isinstance(message, (wire.PortReserved, wire.RankFailed)):
                    # What the other agents must know.
                    self._awaits_port &= not isinstance(message, wire.PortReserved)
                    self.send(message, to=[other for other in self._links if other is not link])
                call.actions.take(link.ranks, message)
                unwanted.pop_all()
                call.take(message, fds)

    # ---- an agent that is lost -------------------------------------------------------------

    def _lose(self, link: AgentLink, end: AgentEnd) -> None:
        """Drop an agent that is gone: mark its ranks as ended, and end the call on all other ranks.

        If all ranks of the agent had ended before, no call is affected.
        """
        self._links.remove(link)
        ended = {process.rank for process in self.processes if process.status == "ended"}
        link.end()
        with self._channels():
            link.channel.close()
        if ended.issuperset(link.ranks):
            # Its ranks had ended before, and so it ended in order: no call loses anything. A stop
            # may have waited for its answer alone (the call's next `tick`).
            return
        self._lost.append(replace(end, ranks=link.ranks))
        self.processes = tuple(
            replace(process, status="ended")
            if process.rank in link.ranks and process.rank not in ended
            else process
            for process in self.processes
        )
        call = self._call
        if call is None:
            return
        call.lose(link.ranks)
        if self._awaits_port and link is self._all_links[0]:
            # It had rank 0, and is lost before it named the port for which the others wait.
            self._send_kill()
        self.send(wire.RankFailed(run=self.run, call=call.number))

    # ---- each turn of the thread -----------------------------------------------------------

    def _tick(self) -> None:
        call = self._call
        if call is not None:
            call.tick()
            if call.is_over and not self._has_announced_end:
                self._has_announced_end = True
                self.send(wire.CallEnded(run=self.run, call=call.number))
            if call.is_over and not self._is_shutting_down and self._has_all_output(call):
                self._end_call(call)
        now = time.monotonic()
        if self._kill_asked is not None and now >= self._kill_asked + _DEAF_SECONDS:
            self._kill_asked = now
            for link in self._links:
                link.end()
        call = self._call  # None if it was ended above: nothing is asked about it any more
        for link in self._links:
            silent = now - link.channel.heard
            if silent < _SILENT_SECONDS or call is None or is_readable(link.channel):
                # What came and was not read yet says that this process was held up, not the agent.
                continue
            if self._end_asked is not None and now >= self._end_asked + _SILENT_SECONDS:
                link.end()
            elif silent >= _TELL_SILENCE_SECONDS:
                text = (
                    f"the helper process that watches {rank_list(link.ranks)} says nothing: "
                    "it may be stopped (SIGSTOP), or its machine too busy. When it goes on, so "
                    "does the run; run.stop() ends it"
                )
                call.take(wire.Notice(call=call.number, text=text), ())

    def _has_all_output(self, call: RunningCall) -> bool:
        """Return whether the whole output of the call from other machines has arrived here."""
        return all(
            log.is_whole or log.start + log.received >= call.state.ranks[rank].log_end
            for link in self._links
            for rank, log in link.channel.logs.items()
        )

    def _end_call(self, call: RunningCall) -> None:
        with self._lock:
            self._call = None
            # With the call ends what was asked about it: no agent owes an answer any more.
            self._kill_asked = None
            self._end_asked = None
            if not call.state.ended_well:
                # A rank that left its loop early, or was interrupted in a collective, may have
                # the group in a state that the others do not share.
                self._group_generation += 1
        call.finish(tuple(self._lost))

    def _finish(self) -> None:
        # Somebody may be sending a last message.
        with self._channels():
            for link in self._links:
                link.channel.close()
        with self._lock:
            call, self._call = self._call, None
        self.ended.set()
        if call is not None:
            call.finish(tuple(self._lost))
