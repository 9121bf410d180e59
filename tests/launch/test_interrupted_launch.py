"""An interrupt at any instant of a launch leaves no folder, no descriptor and no run behind."""

import contextlib
import dis
import functools
import os
import pathlib
import signal
import sys
import time

import pytest

from notebook_accel.config import LaunchConfig
from notebook_accel.launch import payload, run_list
from notebook_accel.launch.control.call import RankCall
from notebook_accel.launch.control.pool import RankPool
from notebook_accel.launch.launch_request import LaunchRequest
from notebook_accel.launch.launcher import Session
from notebook_accel.launch.run import Run
from notebook_accel.launch.run_list import runs
from notebook_accel.launch.template.handle import template
from notebook_accel.launch.view import View
from tests.engines.processes import below
from tests.launches import call, launch
from tests.waiting import eventually

NUM_INSTANTS = 25
# More than travels inside of a message: it goes as a descriptor.
BIG = b"x" * 200_000
# After these instructions CPython looks for signals.
_LOOKING = ("CALL", "JUMP_BACKWARD", "POP_JUMP_BACKWARD", "RESUME")
ON_CPU = LaunchConfig(num_processes=1, devices="cpu")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("NOTEBOOK_ACCEL_RUNS", str(tmp_path))
    yield tmp_path
    eventually(lambda: not below(template().pid), what="every process ended")


@functools.cache
def _handler(code, offset):
    """Where the code goes on after an error at ``offset``; always 0 before Python 3.11."""
    entries = getattr(dis.Bytecode(code), "exception_entries", ())
    return next((entry.target for entry in entries if entry.start <= offset < entry.end), 0)


class Stepped:
    """Counts the steps of this package's code in the main thread, and interrupts one of them.

    A step is what Python does between two looks for signals. Where it does not look no interrupt
    can come, and one that comes while a call ends belongs to that call: an error that a tracer can
    raise only at the next instruction would leave a lock locked if that is not of the `with` any
    more. Such instants are left out.
    """

    def __init__(self, instant=None):
        self.num_steps = 0
        self._instant = instant

    def __call__(self, frame, event, _):
        name = frame.f_code.co_filename
        if "notebook_accel" not in name and not name.endswith("contextlib.py"):
            return None
        frame.f_trace_opcodes = True
        code, before = frame.f_code, None

        def step(frame, event, _):
            nonlocal before
            if event == "opcode":
                last, before = before, frame.f_lasti
                looks = last is not None and dis.opname[code.co_code[last]].startswith(_LOOKING)
                if looks and _handler(code, last) == _handler(code, before):
                    self._take_step()
            return step

        return step

    def _take_step(self):
        self.num_steps += 1
        if self.num_steps == self._instant:
            signal.raise_signal(signal.SIGINT)

    def during(self, act):
        """Whether ``act`` was interrupted."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            act()
        except KeyboardInterrupt as error:
            run = getattr(error, "run", None)
            assert run is None or (isinstance(run, Run) and run.state.has_ended)
            return True
        finally:
            sys.settrace(before)
        return False


def _descriptors():
    """What this process has open, each by what it leads to."""
    found = []
    for fd in pathlib.Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found.append(os.readlink(fd))
    return found


def _unknown(folder):
    """The folders that belong to no run of the list."""
    return {name for name in os.listdir(folder) if name[0] != "."} - {run.id for run in runs()}


# An interrupt in what Python calls as it frees an object is told as a warning.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_of_packing_a_call():
    def begin():
        payload.pack_call(len, (BIG,))

    def segments():
        return [name for name in _descriptors() if "memfd" in name]

    whole = Stepped()
    assert not whole.during(begin)
    before = segments()  # of runs that still end
    for instant in range(1, whole.num_steps + 1):
        Stepped(instant).during(begin)
        assert len(segments()) <= len(before), f"at step {instant}"


def test_of_a_launch(folder):
    def begin():
        launch(len, (BIG,), config=ON_CPU)

    begin()
    begin()
    _interrupt_everywhere(begin, folder)


def test_of_a_session_and_its_calls(folder):
    def begin():
        with contextlib.closing(Session(LaunchRequest(config=ON_CPU))) as session:
            call(session, len, (BIG,))

    begin()
    _interrupt_everywhere(begin, folder, folders_of_sessions=True)


def test_a_session_that_nobody_got_is_ended(folder):
    # As after an interrupt that comes as the session is returned. The fixture looks at processes.
    session = Session(LaunchRequest(config=ON_CPU))
    call(session, len, (BIG,))
    assert below(template().pid)
    del session


def _interrupt_everywhere(begin, folder, *, folders_of_sessions=False):
    whole = Stepped()
    assert not whole.during(begin)
    files = _descriptors()
    for number in range(NUM_INSTANTS):
        before = _unknown(folder)
        instant = 1 + whole.num_steps * number // NUM_INSTANTS
        Stepped(instant).during(begin)
        if not folders_of_sessions:
            assert _unknown(folder) == before, f"at step {instant}"
        eventually(
            lambda: len(_descriptors()) <= len(files),
            what=f"of step {instant} nothing is open, {files} before",
        )
        eventually(
            lambda: all(run.state.has_ended for run in runs()),
            what=f"all runs have ended, of step {instant} too",
        )


class Printing(View):
    has_printed = False

    def print_end(self):
        self.has_printed = True


def _note_interrupt(folder):
    try:
        (pathlib.Path(folder) / ".began").touch()
        time.sleep(600)
    except KeyboardInterrupt:
        (pathlib.Path(folder) / ".interrupted").touch()
        raise


@pytest.mark.parametrize("block", [True, False])
def test_an_interrupt_while_a_launch_begins_is_one_of_its_ranks(folder, block, monkeypatch):
    send = RankCall.sent

    @contextlib.contextmanager
    def interrupted(*args, **kwargs):
        with send(*args, **kwargs):
            yield
        eventually((folder / ".began").exists, what="the rank is in its function")
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(RankCall, "sent", interrupted)
    view = Printing()
    with pytest.raises(KeyboardInterrupt):
        launch(_note_interrupt, (str(folder),), config=ON_CPU, view=view, block=block)
    assert (folder / ".interrupted").exists(), "nobody killed it"
    assert view.has_printed


def _pid_after(seconds):
    time.sleep(seconds)
    return os.getpid()


def test_an_interrupt_while_a_call_is_sent_ends_the_call_and_keeps_the_ranks(folder, monkeypatch):
    send = RankCall.sent
    with contextlib.closing(Session(LaunchRequest(config=ON_CPU))) as session:
        (before,) = call(session, _pid_after, (0,))

        @contextlib.contextmanager
        def interrupted(*args, **kwargs):
            with send(*args, **kwargs):
                yield
            signal.raise_signal(signal.SIGINT)

        monkeypatch.setattr(RankCall, "sent", interrupted)
        with pytest.raises(KeyboardInterrupt):
            call(session, _pid_after, (600,))
        # Full, so that a run that is listed takes the place of another.
        monkeypatch.setattr(run_list, "_MAX_RUNS", 1)
        listed = runs()
        with pytest.raises(KeyboardInterrupt):
            session.ask(_pid_after, {"seconds": 600})
        assert runs() == listed, "what is only asked is no run"
        monkeypatch.undo()
        assert list(call(session, _pid_after, (0,))) == [before]


@pytest.mark.usefixtures("folder")
def test_an_interrupt_while_a_session_is_closed_ends_it_now(monkeypatch):
    session = Session(LaunchRequest(config=ON_CPU))
    call(session, _pid_after, (600,), block=False)
    tell = RankPool.shut_down

    def shut_down(pool):
        tell(pool)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(RankPool, "shut_down", shut_down)
    with pytest.raises(KeyboardInterrupt):
        session.close(grace=600)
    assert session.status == "ended"
