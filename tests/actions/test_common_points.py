"""All ranks do the same actions at the same points, whatever the order in which processes run.

Real scoreboards, ranks' contexts, agents' parts and the kernel's part, without processes: ranks are
threads of which one runs at a time, changed at random lines of the code, and messages are late.
"""

import random
import sys
import threading
from collections import deque

import pytest

from notebook_accel import wire
from notebook_accel.actions import scoreboard
from notebook_accel.actions.acting import Acting
from notebook_accel.actions.common_actions import POINT_SECONDS, CommonActions
from notebook_accel.actions.scoreboard import Scoreboard
from notebook_accel.errors import RunStopped
from notebook_accel.rank import this_rank as rank_module
from notebook_accel.rank.this_rank import LaunchedContext

NUM_AGENTS, RANKS_EACH = 2, 2
_TRACED = {scoreboard.__file__, rank_module.__file__}


class Recorder:
    """Stands for the knob "x": notes each value with the batch at which the rank takes it."""

    def __init__(self, rank):
        self._rank = rank

    def take(self, value):
        self._rank.record.append((self._rank.num_batches, value))


class Rank:
    """A rank in a thread that runs only while it has the turn."""

    def __init__(self, world, board, number):
        local_rank = number % RANKS_EACH
        numbers = {"rank": number, "world_size": 4, "local_rank": local_rank}
        self.context = LaunchedContext(
            run="r", send=lambda _: None, board=board, local_world_size=RANKS_EACH, **numbers
        )
        self.context.begin_call(
            wire.BeginCall(call=1, payload=wire.Packet(), grace=0.0), has_group=False
        )
        self.context.knobs_made["x"] = Recorder(self)
        self.record = []
        self.num_batches = self.num_steps = 0
        self.has_ended = False
        self.error = None
        self._world = world
        self._row = board.row(local_rank)
        self._turn = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def step(self):
        """Run on to a random line."""
        self._turn.release()
        self._world.back.acquire()

    def give_up_turn(self):
        self._world.back.release()
        self._turn.acquire()

    def _run(self):
        self._turn.acquire()
        try:
            sys.settrace(self._trace)
            self._train()
        except RunStopped:
            self.record.append((self.num_batches, "stop"))
        except BaseException as error:
            self.error = error
        finally:
            sys.settrace(None)
            self._row.call_over = 1
            self.has_ended = True
            self._world.back.release()

    def _train(self):
        for _ in range(self._world.num_batches):
            self.num_batches += 1
            self.context.count_batch()
            self.num_steps += 1
            # The step's collective: nobody leaves it before all have come.
            while any(one.num_steps < self.num_steps for one in self._world.ranks):
                self.give_up_turn()
            if self.context.should_save():
                self.record.append((self.num_batches, "save"))
            if self._world.reads_should_stop and self.context.should_stop():
                self.record.append((self.num_batches, "stop"))
                return

    def _trace(self, frame, event, _):
        if frame.f_code.co_filename not in _TRACED:
            return None
        if event == "line" and self._world.chance.random() < 0.2:
            self.give_up_turn()
        return self._trace


class World:
    """Kernel, two agents and four ranks, driven by one stream of chance."""

    def __init__(self, seed):
        self.chance = random.Random(seed)
        self.num_batches = self.chance.randint(5, 25)
        self.reads_should_stop = self.chance.random() < 0.3
        self.back = threading.Semaphore(0)
        self.now = 0.0
        boards = [Scoreboard(RANKS_EACH, has_others=True) for _ in range(NUM_AGENTS)]
        self.to_kernel = [deque() for _ in boards]
        self.to_agent = [deque() for _ in boards]
        self.acting = [Acting(board, self._post(i), bool) for i, board in enumerate(boards)]
        agents = [(0, 1), (2, 3)]
        self.actions = CommonActions(self._send, lambda: agents, self._note_pause, lambda: self.now)
        self.ranks = []
        self.ranks += [Rank(self, boards[n // RANKS_EACH], n) for n in range(4)]
        self.asked = []
        self.is_paused = False
        self.stops = False

    def _post(self, index):
        return lambda kind, /, **fields: self.to_kernel[index].append(kind(**fields))

    def _send(self, kind, /, **fields):
        for messages in self.to_agent:
            messages.append(kind(**fields))

    def _note_pause(self, is_paused):
        self.is_paused = is_paused

    def _hear_kernel(self, index):
        agent, message = self.acting[index], self.to_agent[index].popleft()
        if isinstance(message, wire.Act):
            is_pause = b"pause" in message.content
            agent.ask(message, is_pause=is_pause, refused="", now=self.now)
        elif isinstance(message, wire.ActAt):
            agent.act_at(message)
        elif isinstance(message, wire.Hold):
            agent.hold(message, self.now)
        else:
            agent.ask_stop(self.now)

    def _ask(self, number):
        kind = self.chance.choice(["set", "set", "save", "pause"])
        action = wire.Action(kind=kind, values={"x": number} if kind == "set" else {})
        done = self.actions.ask(action)
        assert not self.stops or "is being stopped" in str(done.exception())
        self.asked.append((action, done))

    def _someone_asks(self, number):
        what = self.chance.random()
        if self.is_paused and what < 0.5:
            self.actions.go_on()
        elif what < 0.6:
            self._ask(number)
        elif what < 0.9:
            self.now += POINT_SECONDS
        elif what < 0.91 and not self.stops:
            self.stops = True
            self.actions.note_stop()
            self._send(wire.Stop)

    def turns(self):
        """Do one thing after the other until all ranks have ended."""
        for number in range(1_000_000):
            if all(rank.has_ended for rank in self.ranks):
                return
            yield number
            self.now += self.chance.choice([0.0, 0.0005, 0.002])
            what = self.chance.random()
            index = self.chance.randrange(NUM_AGENTS)
            if what < 0.6:
                self.chance.choice([rank for rank in self.ranks if not rank.has_ended]).step()
            elif what < 0.75 and self.to_agent[index]:
                self._hear_kernel(index)
            elif what < 0.9 and self.to_kernel[index]:
                self.actions.take([(0, 1), (2, 3)][index], self.to_kernel[index].popleft())
            elif what < 0.98:
                self.acting[index].tick(self.now)
                self.actions.look()
            else:
                self._someone_asks(number)
        raise AssertionError(f"ranks wait for ever: {[rank.record for rank in self.ranks]}")


def run_world(seed, monkeypatch):
    world = World(seed)
    ranks = {rank._thread: rank for rank in world.ranks}

    class Sleeping:
        @staticmethod
        def sleep(_):
            ranks[threading.current_thread()].give_up_turn()

    monkeypatch.setattr(scoreboard, "time", Sleeping)
    for _ in world.turns():
        pass
    return world


def check(world):
    assert [rank.error for rank in world.ranks] == [None] * 4
    # After the last batch a rank may stop where another has ended: both have trained the same.
    stop_at_end = (world.num_batches, "stop")
    records = [[each for each in one.record if each != stop_at_end] for one in world.ranks]
    first = records[0]
    assert all(record == first for record in records), records
    taken = [value for _, value in first if isinstance(value, int)]
    assert taken == sorted(taken), "in the order in which they were asked"
    for action, done in world.asked:
        value = action.values.get("x")
        if done.done() and isinstance(done.exception(), TimeoutError):
            assert value is None or value not in taken, "what was withdrawn, nobody did"


TEN_THOUSAND = [range(first, first + 250) for first in range(1_000, 11_000, 250)]


@pytest.mark.parametrize(
    "seeds",
    [
        *(range(first, first + 50) for first in range(0, 200, 50)),
        *(pytest.param(seeds, marks=pytest.mark.long) for seeds in TEN_THOUSAND),
    ],
    ids=lambda seeds: str(seeds.start),
)
def test_ranks_act_alike_in_any_order_of_events(seeds, monkeypatch):
    for seed in seeds:
        check(run_world(seed, monkeypatch))


def test_an_agent_whose_ranks_have_ended_answers_before_it_asks_for_a_stop():
    board = Scoreboard(1, has_others=True)
    board.row(0).call_over = 1
    posted = []
    acting = Acting(
        board, lambda kind, /, **sent: posted.append((kind.__name__, sent["number"])), bool
    )
    acting.ask(wire.Act(number=1, content=b""), is_pause=False, refused="", now=0.0)
    acting.ask_stop(0.0)
    acting.tick(1.0)
    acting.tick(2.0)
    assert posted == [("ActionDone", 1), ("PointReached", 1), ("PointReached", scoreboard.STOP)]


def test_where_one_rank_reads_should_stop_all_leave_at_a_read():
    answers = [wire.Passed(batches=3), wire.Passed(reads=1, reads_should_stop=True)]
    assert scoreboard.leave_after(answers) == wire.Point(reads=2)


@pytest.mark.parametrize(
    ("passed", "point"),
    [
        (wire.Passed(batches=3, begun=3, saves=3), wire.Point(batches=4)),
        (wire.Passed(begun=3, saves=2), wire.Point(batches=1, reads=1, begun=4)),
        (wire.Passed(reads=3, saves=2), wire.Point(batches=1, reads=4, begun=1)),
        (wire.Passed(saves=2), wire.Point(batches=1, reads=1, begun=1, saves=3)),
    ],
)
def test_reads_of_should_save_are_points_where_nothing_else_is(passed, point):
    assert scoreboard.meet_after([wire.Passed(), passed]) == point
