"""The agent process: one per machine of a run. It forks, watches, reaps and ends the ranks there.

    kernel --Launch--> agent --fork--> ranks --RankReady--> kernel
    kernel --BeginCall-> agent --BeginCall--> each rank
    kernel <---------- agent <-------- a rank's messages in the call, then Returned or Raised
    kernel --Shutdown-> agent --Shutdown-> each rank, which ends; after the last rank the agent ends

The kernel is the notebook's own process. A call is one function that every rank runs; the same rank
processes may run several calls, one after the other.

The agent forwards messages in both directions, follows the ranks' output and counters, and ends a
call when the kernel asks for it or a rank fails (``ending.py``). It runs no user code, so it can
act whatever a rank does. It is a subreaper (orphaned descendants become its children), and its
ranks get SIGKILL when it dies. It watches the kernel's process and the connection to the kernel;
when either is gone, it ends its ranks at once.

Invariants: a rank is in one call at most; all ranks are in the same call; a rank's message about
any call but the newest is dropped.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import torch.multiprocessing as mp

from notebook_accel import wire
from notebook_accel.actions.acting import Acting
from notebook_accel.actions.ending import STAGES, Ending, Stage
from notebook_accel.actions.scoreboard import STOP, Scoreboard
from notebook_accel.launch.agent.rank_process import BROKEN, RankProcess
from notebook_accel.launch.transport.channel import Channel, ProtocolError
from notebook_accel.launch.transport.frames import FramedChannel
from notebook_accel.launch.worker import main as worker
from notebook_accel.launch.worker.interrupts import WAKE_SIGNAL
from notebook_accel.private import of_torch
from notebook_accel.system import limits, processes
from notebook_accel.system.limits import free_memory

_LOOPBACK = "127.0.0.1"
# A connection that closes is mostly the first sign of a process that ends. One that still lives
# after this time has closed it itself.
_CLOSED_SECONDS = 1.0
# How long the last messages wait for a kernel that does not read.
_FLUSH_SECONDS = 1200.0
# How late the end of a grace period is noticed; messages and ends of processes wake it at once.
_TICK_SECONDS = 0.05
# The kernel takes an agent that says nothing for much longer for a stopped one.
_ALIVE_SECONDS = 2.0
# How long a polite stop goes on until a line says what it waits for, if a step takes long.
_WAIT_NOTICE_SECONDS = 1.0
_LONG_STEP_SECONDS = 2.0
_ACT_TICK_SECONDS = 0.002  # while the kernel and all ranks wait for the answer to a stop, say
# Messages that wait for a slow kernel, above which ranks have to wait as well.
_BUSY_PENDING = 4096
# Metrics are passed on together, as often as output is (rank_process.py); the first after a pause
# goes at once. One message has `_MAX_METRICS` of them at most.
_METRICS_SECONDS = 0.1
_MAX_METRICS = 100


def start_ranks(ranks: Iterable[RankProcess], unneeded: Sequence[int]) -> list[RankProcess]:
    """Fork one process per rank, without waiting until the ranks are ready for calls.

    Each rank is made after those before have been forked, which so do not inherit what is its.
    """
    forked: list[RankProcess] = []
    # What they share is not looked through in each of them, which would make its pages their own.
    gc.freeze()
    for rank in ranks:
        of_others = [fd for other in forked for fd in other.descriptors()]
        process = mp.get_context("fork").Process(
            target=worker.main,
            args=(rank.inherited, (*unneeded, *of_others, rank.channel.fileno())),
            name=f"rank-{rank.rank}",
        )
        process.start()
        rank.follow(process)
        forked.append(rank)
    return forked


def _reserve(port: int, *, host: str = _LOOPBACK, is_shared: bool = False) -> socket.socket:
    """Return a socket bound to a port of this machine, for a store of rank 0 to listen on.

    Rank 0 gets this very socket. If the port were only agreed on and rank 0 bound it later, with
    SO_REUSEADDR, another user could bind it too, listen first, and get the other ranks'
    connections.
    """
    bound = socket.socket()
    if port or is_shared:
        # Connections of the run before may linger on a port that the user chose, and only
        # SO_REUSEADDR gets past them.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind((host, port))
    if port and not is_shared:
        # Of sockets with SO_REUSEADDR only one that listens keeps the others out.
        bound.listen(socket.SOMAXCONN)
    return bound


# The modules whose ``start_ranks`` starts rank processes, by ``wire.Launch.start_method``.
_START_METHODS = {"fork": __name__, "xla": "notebook_accel.launch.agent.spawning"}


def main(channel: Channel, kernel: int, first: tuple[wire.Message, list[int]]) -> None:
    """Run the agent of one run in this process, until all its ranks have ended."""
    # A rank that was just forked, and has no handlers yet, inherits this.
    for number in (signal.SIGINT, worker.STACKS_SIGNAL, WAKE_SIGNAL):
        signal.signal(number, signal.SIG_IGN)
    processes.adopt_orphans()
    limits.raise_limit()
    message, _ = first
    if not isinstance(message, wire.Launch):
        raise ProtocolError(f"the first message must be Launch, not {type(message).__name__}")
    processes.use_scratch(message.run)
    agent = Agent(channel, kernel, message)
    try:
        agent.start()
        agent.serve()
    finally:
        agent.close()


class Agent:
    """Supervises the rank processes of one run on this machine, and the call that they are in."""

    def __init__(self, channel: Channel, kernel: int, launch: wire.Launch) -> None:
        self._channel = channel
        self._kernel = kernel
        self._launch = launch
        self._has_others = len(launch.ranks) < launch.world_size
        self._has_rank_0 = 0 in launch.ranks
        self._board = Scoreboard(len(launch.ranks), has_others=self._has_others)
        # Of a kernel on another machine, to which the bytes of the files are sent, one of our own.
        self._log_dir = Path(launch.log_dir or processes.scratch_folder(launch.run, os.getpid()))
        self.ranks: list[RankProcess] = []
        self.ended: list[RankProcess] = []
        self.reaped: list[int] = []
        self._selector = selectors.DefaultSelector()
        # A rank alone has nobody to meet, and leaves MASTER_PORT to its children; and stores that
        # are torch's own bind it themselves.
        self._shares_port = launch.world_size == 1 or not of_torch.is_to_replace(launch.environment)
        # Bound before the ranks begin: MASTER_PORT, by the agent of rank 0, which serves the store
        # there; and a port for the run's own groups, if all ranks are on this machine.
        self._master: socket.socket | None = None
        if self._has_rank_0:
            self._reserve_master(int(launch.environment.get("MASTER_PORT", "0")))
        self._store = None if self._has_others else _reserve(0)
        self._group_generation = 0
        self._is_shutting_down = False
        # A call and what came after it, until the agent of rank 0 has named the port of its ranks.
        self._held: list[tuple[wire.Message, list[int]]] = []
        self._next_alive = 0.0
        # What ranks have logged, until it is passed on.
        self._metrics: list[wire.Metric] = []
        self._next_metrics = 0.0
        self.may_pause = False
        # Of the call:
        self._call = 0
        self._ending = Ending()
        self._acting = Acting(self._board, self._post_of_call, self._relay_all)
        self._interrupted_at = math.inf
        # When a polite stop began, or its point was found; and when it is said what it waits for.
        self._stopping_since = 0.0
        self._next_wait_notice = math.inf

    # ---- start -----------------------------------------------------------------------------

    def start(self) -> None:
        launch = self._launch
        own = [self._channel.fileno(), self._kernel, self._selector.fileno()]
        if self._master is not None:
            own.append(self._master.fileno())
        made_of = launch, self._board, self._log_dir, self._store
        ranks = (RankProcess(index, *made_of) for index in range(len(launch.ranks)))
        self.ranks = import_module(_START_METHODS[launch.start_method]).start_ranks(ranks, own)
        self._hand_over_master()
        if isinstance(self._channel, FramedChannel):
            for rank in self.ranks:
                self._channel.follow(rank.rank, rank.tail.fileno())
        self._post(wire.AgentReady, pids={rank.rank: rank.pid for rank in self.ranks})

    def _reserve_master(self, port: int) -> None:
        """Bind MASTER_PORT; with port 0 it is another one than before.

        The agents of other ranks learn its number with each call.
        """
        # Other machines have to reach it, by whatever name MASTER_ADDR has for it.
        address = self._launch.environment.get("MASTER_ADDR", _LOOPBACK)
        host = address if self._has_others else _LOOPBACK
        if self._shares_port and not port:
            # A store of torch's own binds it at all addresses: a connection from one of them may
            # have a port that is free at another.
            host = ""
        # The old one is let go of afterwards.
        old, self._master = self._master, _reserve(port, host=host, is_shared=self._shares_port)
        if old is not None:
            old.close()

    def _hand_over_master(self) -> None:
        """Send the socket of MASTER_PORT to rank 0, unless rank 0 is to bind the port itself."""
        if self._master is not None and not self._shares_port:
            self.ranks[0].send(wire.MasterSocket(), [self._master.fileno()])

    # ---- serve -----------------------------------------------------------------------------

    def serve(self) -> None:
        """Run the event loop until every rank has ended, and the kernel has all queued messages.

        Each turn forwards messages, reaps ended ranks, and reads the ranks' output and counters.
        A kernel that does not read has 20 minutes from the end of the last rank on, so that results
        still reach one that reads slowly.
        """
        self._watch(self._channel.fileno(), self._from_kernel)
        self._watch(self._kernel, self._kernel_gone)
        for rank in self.ranks:
            self._watch(rank.channel.fileno(), partial(self.relay, rank))
            self._watch(rank.exit_fd, partial(self.ended.append, rank))
        # What came together with Launch was read with it: nothing would wake us for that.
        self._from_kernel()
        until = math.inf
        while time.monotonic() < until:
            tick = _ACT_TICK_SECONDS if self._acting.is_awaited else _TICK_SECONDS
            for key, _ in self._selector.select(tick):
                key.data()
            if self.ended:
                self.reap_ended()
            self._tick()
            if self.may_pause:
                # A rank that logs a thousand values a second would wake this loop for each of
                # them: in a pause several come together. One pause for all ranks, so that a
                # message of the kernel's, such as a stop, does not wait for a pause of each.
                self.may_pause = False
                time.sleep(_TICK_SECONDS / 10)
            if not any(rank.alive for rank in self.ranks):
                until = min(until, time.monotonic() + _FLUSH_SECONDS)
                if self._channel.is_idle:
                    return

    def _watch(self, fd: int, act: Callable[[], None]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, act)

    def _unwatch(self, fd: int) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(fd)

    def _tick(self) -> None:
        now = time.monotonic()
        for rank in self._in_call():
            row = rank.row
            counts = row.batches, row.steps, row.reads
            rank.clock.note(counts, now, is_paused=bool(row.paused))
        for rank in self.ranks:
            if rank.alive:
                for message in rank.observe(now):
                    self._channel.post(message)
                rank.wake_if_unseen(now)
                is_closed = rank.closed_at is not None and now >= rank.closed_at + _CLOSED_SECONDS
                if is_closed and not rank.ended_by_agent:
                    self._report_broken(rank)
                    rank.send_signal(signal.SIGKILL)
        if now >= self._next_metrics and self._metrics:
            self._next_metrics = now + _METRICS_SECONDS
            self._post_metrics()
        self._acting.tick(now)
        self._tell_what_stop_waits_for(now)
        if self._call and not self._ending.is_last and not self._in_call():
            # All ranks have left this call: forget its stages, or they would cut a shutdown short.
            self._ending = Ending(grace=self._ending.grace, is_last=False)
        # With no rank in the call any more, the living processes count: a thread of the user's may
        # keep one of them for ever.
        ranks = self._in_call() or [rank for rank in self.ranks if rank.alive]
        stage = self._ending.next_stage(
            now=now,
            stuck=self._are_stuck(now, since=self._stopping_since),
            hears=any(rank.clock.hears for rank in self._moving(now, since=self._stopping_since)),
            leaving=all(map(self._is_reached, ranks)),
            # The connections of a killed process close before it can be reaped, and other ranks may
            # fail because of that: no other rank is blamed before it has ended.
            all_settle=all(
                rank.has_started and not rank.row.has_raised and rank.closed_at is None
                for rank in self._in_call()
            ),
        )
        if stage is not None:
            self._enter_stage(stage)
        if now >= self._next_alive and not self._channel.num_pending:
            self._next_alive = now + _ALIVE_SECONDS
            self._post(wire.Alive)
        with contextlib.suppress(OSError):
            self._channel.flush(block=False)
        # Wakes when a full socket can take more.
        wanted = selectors.EVENT_WRITE if self._channel.num_pending else 0
        self._selector.modify(
            self._channel.fileno(), selectors.EVENT_READ | wanted, self._from_kernel
        )

    def _going_on(self) -> list[RankProcess]:
        """Return the ranks in the call that the stop has not reached."""
        return [rank for rank in self._in_call() if not self._is_reached(rank)]

    def _is_reached(self, rank: RankProcess) -> bool:
        if self._ending.stage == Stage.ALIGN:
            return rank.row.seen_interrupt == self._call
        return bool(rank.row.leaving)

    def _are_stuck(self, now: float, *, since: float) -> bool:
        """Return whether none of the ranks that a stop has not reached makes progress."""
        return bool(self._going_on()) and not self._moving(now, since=since)

    def _moving(self, now: float, *, since: float) -> list[RankProcess]:
        """Return the ranks that a stop has not reached, and that make progress."""
        grace = self._ending.grace if self._ending.stage == Stage.STOP else None
        going_on = self._going_on()
        return [one for one in going_on if not one.clock.is_stuck(now, since=since, grace=grace)]

    def _tell_what_stop_waits_for(self, now: float) -> None:
        if now < self._next_wait_notice or self._ending.stage not in (Stage.STOP, Stage.ALIGN):
            return
        self._next_wait_notice = math.inf
        again = "interrupts" if self._ending.stage == Stage.STOP else "ends"
        for rank in self._going_on():
            is_first, seconds = rank.clock.is_in_first_step, rank.clock.step
            if is_first or seconds >= _LONG_STEP_SECONDS:
                step = "its first step" if is_first else f"a step of about {seconds:.0f} s"
                text = f"Stop waits: rank {rank.rank} is in {step} (Stop again {again} it)"
                self._post_of_call(wire.Notice, text=text)
                return

    def _in_call(self) -> list[RankProcess]:
        """Return the living ranks whose part of the current call has not ended."""
        return [rank for rank in self.ranks if rank.alive and rank.is_in_call]

    # ---- what the kernel says --------------------------------------------------------------

    def _from_kernel(self) -> None:
        try:
            messages = self._channel.drain()
        except (EOFError, OSError, ProtocolError):
            self._kernel_gone()
            return
        for message, fds in messages:
            due = [(message, fds)]
            needs_port = isinstance(message, wire.BeginCall) and not self._has_rank_0
            if isinstance(message, wire.PortReserved) and self._held:
                due, self._held = self._held, []
                begin = msgspec.structs.replace(due[0][0], master_port=message.port)
                due[0] = begin, due[0][1]
            elif needs_port or (self._held and not isinstance(message, wire.Kill)):
                self._held += due
                continue
            for one, its_fds in due:
                self._handle_kernel_message(one, its_fds)
                for fd in its_fds:
                    os.close(fd)

    def _handle_kernel_message(self, message: wire.Message, fds: Sequence[int]) -> None:
        if isinstance(message, wire.BeginCall):
            self._begin_call(message, fds)
        elif isinstance(message, wire.Shutdown):
            self._is_shutting_down = True
            for rank in self.ranks:
                rank.send(message)
        elif isinstance(message, wire.DumpStacks):
            for rank in self.ranks:
                if message.rank in (None, rank.rank):
                    rank.ask_stacks()
        elif isinstance(message, wire.Kill) and (not message.call or message.call > self._call):
            # About all processes, or a call whose payload is still on its way.
            self._is_shutting_down = True
            self._ending = Ending()
            self._enter_stage(Stage.KILL)
        elif message.call == self._call:
            self._handle_message_of_call(message)

    def _handle_message_of_call(self, message: wire.Message) -> None:
        now = time.monotonic()
        if isinstance(message, wire.Act):
            is_pause = msgspec.msgpack.decode(message.content, type=wire.Action).kind == "pause"
            refused = ""
            on_devices = sum(rank.row.device_memory for rank in self._in_call())
            if is_pause and on_devices > (free := free_memory()):
                refused = (
                    f"{on_devices / 2**30:.1f} GB on the devices would have to go to the memory of "
                    f"the host, which has {free / 2**30:.1f} GB free: save() and stop(), or free "
                    "memory"
                )
            self._acting.ask(message, is_pause=is_pause, refused=refused, now=now)
        elif isinstance(message, wire.ActAt):
            if message.number == STOP:
                self._stopping_since = now
            self._acting.act_at(message)
        elif isinstance(message, wire.Hold):
            self._acting.hold(message, now)
        elif isinstance(message, wire.RankFailed):
            self._ending = self._ending.failed(now=now)
        elif isinstance(message, wire.CallEnded):
            self._board.note_others_ended()
        elif type(message) in STAGES:
            before = self._ending
            self._enter_stage(STAGES[type(message)], grace=getattr(message, "grace", None))
            if isinstance(message, wire.Stop) and self._ending is before:
                # Answered in any case: by that the kernel knows that this agent lives.
                self._post_of_call(wire.PointReached, number=STOP)

    def _begin_call(self, message: wire.BeginCall, fds: Sequence[int]) -> None:
        if message.group_generation != self._group_generation:
            self._group_generation = message.group_generation
            if self._master is not None:
                # The ranks drop their group: rank 0 may still listen here for the old one's store.
                self._reserve_master(0)
                self._hand_over_master()
        self._post_metrics()  # which are of the call before
        self._call = message.call
        self._is_shutting_down = self._is_shutting_down or message.last
        self._ending = Ending(grace=message.grace, is_last=self._is_shutting_down)
        self._interrupted_at = math.inf
        self._board.reset()
        self._acting = Acting(self._board, self._post_of_call, self._relay_all)
        bound = self._master
        port = message.master_port or (0 if bound is None else int(bound.getsockname()[1]))
        if self._has_others and self._has_rank_0:
            self._post(wire.PortReserved, call=self._call, port=port)
        for rank in self.ranks:
            rank.begin_call(msgspec.structs.replace(message, master_port=port), fds)
        if not all(rank.alive for rank in self.ranks):
            self._rank_failed()

    def _kernel_gone(self) -> None:
        """Kill the ranks and exit this process: the kernel, or the connection to it, is gone."""
        self.close()
        os._exit(0)

    # ---- what ranks say --------------------------------------------------------------------

    def relay(self, rank: RankProcess) -> None:
        """Forward a rank's messages to the kernel, unless thousands already wait for it to read.

        In that case they stay in the rank's socket. A rank whose socket is full has to wait.
        """
        if self._channel.num_pending > _BUSY_PENDING:
            self.may_pause = True
            return
        try:
            messages = rank.channel.drain(limit=_BUSY_PENDING)
        except (EOFError, OSError, ProtocolError) as error:
            self._unwatch(rank.channel.fileno())
            rank.closed_at = 0.0 if isinstance(error, ProtocolError) else time.monotonic()
            return
        # Metrics alone: what else a rank says is passed on at once.
        self.may_pause |= {type(message) for message, _ in messages} == {wire.Metric}
        self._pass_on(rank, messages)

    def _relay_all(self) -> None:
        for rank in self.ranks:
            if rank.alive and rank.closed_at is None:
                self.relay(rank)

    def _report_broken(self, rank: RankProcess) -> None:
        """Tell the kernel that user code broke a rank's connection: closed it, or wrote into it."""
        if not rank.is_in_call:
            self._post(wire.Notice, text=f"rank {rank.rank} {BROKEN}")
            return
        raised = wire.Raised(
            run=self._launch.run,
            call=self._call,
            rank=rank.rank,
            kind="exception",
            type_name="ConnectionError",
            text=f"it {BROKEN}",
        )
        self._channel.post(self._handle_rank_message(rank, raised))

    def _pass_on(
        self, rank: RankProcess, messages: Sequence[tuple[wire.Message, list[int]]]
    ) -> None:
        for message, fds in messages:
            # User code can write to the channel of its rank: only what a rank may say now is passed
            # on, and the agent sets the rank itself.
            if isinstance(message, (wire.Returned, wire.Raised)):
                may_say = rank.is_in_call and message.call == self._call
            else:
                is_of_rank = isinstance(message, wire.FROM_RANK)
                may_say = is_of_rank and message.call in (0, self._call)
            if may_say:
                stamped = msgspec.structs.replace(message, rank=rank.rank)
                if isinstance(stamped, wire.Metric):
                    self._metrics.append(stamped)
                    if len(self._metrics) >= _MAX_METRICS:
                        self._post_metrics()
                else:
                    self._channel.post(self._handle_rank_message(rank, stamped), fds)
            for fd in fds:
                os.close(fd)

    def _post_metrics(self) -> None:
        """Forward the gathered metrics to the kernel in one message, if there are any.

        Called ten times a second at most, and before a call ends, because the kernel drops metrics
        of a call that has ended.
        """
        if self._metrics:
            metrics, self._metrics = tuple(self._metrics), []
            self._post(wire.Metrics, call=self._call, metrics=metrics)

    def _handle_rank_message(self, rank: RankProcess, message: wire.Message) -> wire.Message:
        if isinstance(message, wire.RankReady) and message.process != rank.pid:
            # It runs in another process than the one that was started: that is watched.
            self._unwatch(rank.exit_fd)
            host = next((one for one in self.ranks if one.rank == message.host), rank)
            rank.move(message.process, host)
            self._watch(rank.exit_fd, partial(self.ended.append, rank))
            self._post(wire.AgentReady, pids={one.rank: one.pid for one in self.ranks})
        if isinstance(message, wire.CallStarted):
            rank.has_started = True
            self._ending = self._ending.begun(now=time.monotonic())
        if not isinstance(message, (wire.Returned, wire.Raised)):
            return message
        # The kernel may take the call for ended with the next message: all that was logged and
        # printed comes before.
        self._post_metrics()
        rank.is_in_call, rank.has_returned = False, isinstance(message, wire.Returned)
        for news in rank.last_news():
            self._channel.post(news)
        if not isinstance(message, wire.Raised):
            return message
        message = msgspec.structs.replace(
            message, after_interrupt=message.monotonic >= self._interrupted_at
        )
        if message.kind == "interrupted" and self._ending.has_failed:
            return msgspec.structs.replace(message, ended_by_agent=True)
        if message.kind in ("exception", "exit", "lost peer"):
            self._rank_failed()
        return message

    def _rank_failed(self) -> None:
        """Begin to end the call on the other ranks, since a rank of this agent failed.

        First comes the settle window: a rank that fails by itself in this time gets its own error
        reported (``ending.py``).
        """
        self._ending = self._ending.failed(now=time.monotonic())
        if self._has_others:
            self._post(wire.RankFailed, call=self._call)

    def reap_ended(self) -> None:
        """Reap ended ranks: forward their last messages, kill their children, tell the kernel.

        It handles all ended ranks at once, because the search for their children is slow: it reads
        every process of the machine.
        """
        exits: list[tuple[RankProcess, bool, int]] = []
        for rank in self.ended:
            self._unwatch(rank.exit_fd)
            if not rank.channel.closed:
                # However slowly the kernel reads.
                try:
                    while messages := rank.channel.drain():
                        self._pass_on(rank, messages)
                except (EOFError, OSError, ProtocolError):
                    # It ended in order; or its code had closed its end before, or written into it,
                    # and the result of a call that it has ended never comes.
                    if rank.is_in_call and rank.row.call_over:
                        rank.closed_at = 0.0
                self._unwatch(rank.channel.fileno())
            was_in_call = rank.is_in_call
            if was_in_call and rank.closed_at == 0.0 and not rank.ended_by_agent:
                self._report_broken(rank)
            exits.append((rank, was_in_call, rank.reap()))
            self.reaped.append(rank.pid)
        self.ended.clear()
        alive = [pid for rank in self.ranks if rank.alive for pid in rank.needed_pids]
        self.reaped += processes.kill_descendants(keep=alive)
        if not alive:
            # Before the kernel hears of it: the next launch may want the same port.
            for bound in filter(None, (self._master, self._store)):
                bound.close()
            self._master = None
        for rank, was_in_call, exitcode in exits:
            self._tell_end(rank, was_in_call=was_in_call, exitcode=exitcode)

    def _tell_end(self, rank: RankProcess, *, was_in_call: bool, exitcode: int) -> None:
        """Report the end of a reaped rank to the kernel; if it is a failure, end the call."""
        self._post_metrics()
        for message in rank.last_news():
            self._channel.post(message)
        if isinstance(self._channel, FramedChannel):
            self._channel.end(rank.rank)
        # Once its function has returned, or all have ended the call, a bad exit code fails nobody.
        is_failure = was_in_call or (exitcode and not (rank.has_returned or self._board.all_ended))
        rank.row.call_over = 1
        if is_failure and not rank.ended_by_agent:
            self._rank_failed()
        self._post(
            wire.RankEnded,
            rank=rank.rank,
            exitcode=exitcode if exitcode >= 0 else None,
            signal=-exitcode if exitcode < 0 else None,
            stack=rank.crash_stack(-exitcode),
            ended_by_agent=rank.ended_by_agent,
            after_interrupt=time.monotonic() >= self._interrupted_at,
        )

    # ---- what goes out ---------------------------------------------------------------------

    def _enter_stage(self, stage: Stage, *, grace: float | None = None) -> None:
        """Take one step of ending the call, unless it or a harder step was taken before."""
        before, now = self._ending, time.monotonic()
        if (
            stage == Stage.INTERRUPT
            and before.stage == Stage.NONE
            and not before.has_failed
            and all(rank.row.is_asynchronous for rank in self._in_call())
            and not self._are_stuck(now, since=0)
        ):
            stage = Stage.ALIGN
        self._ending = before.ask(stage, now=now, grace=grace)
        if self._ending is before:
            return
        if stage >= Stage.ALIGN:
            self._interrupted_at = min(self._interrupted_at, now)
        self._carry_out(stage, now)

    def _carry_out(self, stage: Stage, now: float) -> None:
        if stage in (Stage.STOP, Stage.ALIGN):
            self._acting.ask_stop(now, interrupts=stage == Stage.ALIGN)
            self._stopping_since = now
            self._next_wait_notice = now + _WAIT_NOTICE_SECONDS
            for rank in self.ranks:
                rank.clock.stop_asked()
        elif stage == Stage.INTERRUPT:
            for rank in self._in_call():
                if rank.row.seen_interrupt != self._call:  # at the point to which it was brought
                    rank.interrupt()
        elif stage == Stage.DISCONNECT:
            for rank in self._in_call():
                rank.disconnect()
        else:
            number = signal.SIGTERM if stage == Stage.TERMINATE else signal.SIGKILL
            for rank in self.ranks:
                # A process that waits for its next call is spared, with all that it holds.
                if rank.is_in_call or self._is_shutting_down or not self._call:
                    rank.send_signal(number)

    def _post(self, kind: type[wire.Message], /, **fields: Any) -> None:
        self._channel.post(kind(run=self._launch.run, **fields))

    def _post_of_call(self, kind: type[wire.Message], /, **fields: Any) -> None:
        self._post(kind, call=self._call, **fields)

    def close(self) -> None:
        """Kill the remaining ranks and all descendants, remove scratch files, close the channel."""
        processes.kill_tree(rank.pid for rank in self.ranks if rank.alive)
        used_by = [*self.reaped, *processes.kill_descendants()]
        processes.remove_scratch(self._launch.run, os.getpid(), used_by=used_by)
        self._channel.close()
