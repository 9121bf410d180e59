"""What a rank's process does between calls, how a call ends, what the words of an error say."""

import os
import signal
import socket
import sys
import time

import pytest

from notebook_accel import wire
from notebook_accel.actions.scoreboard import RankRow, Scoreboard
from notebook_accel.errors import RunStopped
from notebook_accel.launch import payload
from notebook_accel.launch.payload import MAX_INLINE_BYTES, pack
from notebook_accel.launch.transport.channel import Channel, ProtocolError
from notebook_accel.launch.worker import groups, main
from notebook_accel.launch.worker.interrupts import Interrupts
from notebook_accel.launch.worker.main import Inherited, Worker, _hint, _says_lost_peer
from tests.descriptors import open_descriptors
from tests.rank.test_this_rank import launched


@pytest.fixture
def worker(signals_come_back):
    return new_worker()


def new_worker():
    """A rank of two, whose agent says nothing."""
    launch = wire.Launch(
        run="r",
        world_size=2,
        ranks=(0, 1),
        environment={},
        directory="/",
        path=(),
        log_dir=None,
        num_threads=1,
    )
    _, theirs = socket.socketpair()
    board = Scoreboard(2)
    inherited = Inherited(
        agent_pid=os.getpid(),
        launch=launch,
        local_rank=0,
        store_socket=None,
        channel=Channel(theirs),
        board=board,
        log=-1,
        stacks=-1,
        asks=-1,
    )
    return Worker(inherited, Interrupts(board.row(0)))


def test_a_call_that_cannot_be_read_is_named_in_the_log(worker, capsys, monkeypatch):
    def receive(_):
        raise ProtocolError("too many files are open here")

    monkeypatch.setattr(Channel, "receive", receive)
    assert worker.serve_calls() == 1, "the call before may have gone well"
    assert "cannot read its next call: too many files are open here" in capsys.readouterr().err


def test_a_stuck_rank_is_disconnected_though_it_has_interrupted_itself_before(worker, monkeypatch):
    row, context = worker.row, worker.context
    worker.interrupts.begin_call(3)
    context.begin_call(wire.BeginCall(call=3, payload=wire.Packet(), grace=0.0), has_group=True)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)  # by its own code, which goes on
    disconnected = []
    monkeypatch.setattr(groups, "disconnect", lambda: disconnected.append(row.disconnected_call))
    row.call_over = 0
    row.disconnected_call = 2  # late, and so of no use to this call
    worker.disconnect_if_stuck()
    assert (disconnected, context.lost_group) == ([], False)
    row.interrupted_call = row.disconnected_call = 3  # by the agent, while it is in a collective
    worker.disconnect_if_stuck()
    assert (disconnected, context.lost_group) == ([3], True)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)  # now it has seen the agent's
    worker.disconnect_if_stuck()
    assert disconnected == [3]


@pytest.mark.parametrize(
    "text",
    [
        "[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]",
        "Connection reset by peer",
        "Broken pipe",
        "The client socket has failed: the TCPStore on rank 0\nwas closed",
        "store->get('key') timed out after 300000ms",
        "Read error [127.0.0.1]:33: gloo pair",
        "Timed out waiting 1800000ms for recv operation to complete",
        "failed to recv, got 0 bytes",
        "NCCL communicator was aborted on rank 1",
        "Last error: socketProgress: Connection closed by remote peer localhost<40123>",
    ],
)
def test_what_torch_says_of_a_peer_that_is_gone(text):
    assert _says_lost_peer(text)
    others = ["", "closed the store", "shapes do not match", "the store is open", "gloo read error"]
    assert not any(map(_says_lost_peer, others))


@pytest.mark.parametrize(
    ("error", "is_full"),
    [
        (
            RuntimeError("unable to write to file </torch_7_1_0>: No space left on device (28)"),
            True,
        ),
        (RuntimeError("unable to allocate shared memory(shm) for file </torch_7>"), True),
        (RuntimeError("DataLoader worker (pid 7) ... are out of shared memory."), True),
        (OSError(28, "No space left on device"), True),
        (OSError(2, "No such file"), False),
        (RuntimeError("CUDA out of memory"), False),
        (ValueError("unable to write to file </torch_7_1_0>"), False),
    ],
)
def test_a_full_shared_memory_is_known(error, is_full):
    assert ("num_workers=0" in _hint(error, "in _make_name SemLock")) is is_full
    assert not _hint(OSError(28, "No space left on device"), "in save"), "of a disk"


def test_what_needs_shared_memory_is_named_with_its_remedy():
    of_nccl = (
        "NCCL error in: NCCLUtils.cpp:77, unhandled system error. Last error: Error while creating "
        "shared memory segment /dev/shm/nccl-b7Rfgk (size 9637888)"
    )
    assert "NCCL_SHM_DISABLE" in _hint(RuntimeError(of_nccl), "")
    assert "num_workers=0" in _hint(RuntimeError("out of shared memory"), "")
    assert not _hint(RuntimeError("CUDA out of memory"), "")
    lasting = RuntimeError("CUDA error: an illegal memory access was encountered")
    assert "CUDA_LAUNCH_BLOCKING" in _hint(lasting, "")


@pytest.mark.parametrize("word", ["store ", "read error ", "timed out waiting ", "connection "])
def test_a_long_text_takes_no_long_time(word):
    text = word * 200_000
    begin = time.perf_counter()
    assert not _says_lost_peer(text)
    # A search that begins anew at each word would take minutes.
    assert time.perf_counter() - begin < 20


def outcome_of(parcel, context, *, is_interrupted=False):
    before = signal.getsignal(signal.SIGINT)
    row = RankRow()
    row.interrupted_call = int(is_interrupted)
    try:
        worker = new_worker()
        worker.context, worker.interrupts = context, Interrupts(row)
        message = wire.BeginCall(run="r", call=1, payload=parcel.packet, grace=1.0)
        return worker.run_call(message, [*map(os.dup, parcel.fds)])
    finally:
        signal.signal(signal.SIGINT, before)


def leave(error):
    if error is not None:
        raise error


class FailingStream:
    """What the user's code has put in the place of standard error."""

    def write(self, _text):
        raise RuntimeError("not now")

    flush = write


@pytest.mark.parametrize("stream", [FailingStream(), None], ids=["failing", "none"])
def test_a_stream_of_the_users_own_hides_no_error(stream, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream)
    parcel = payload.pack_call(leave, (KeyError("lost"),)).parcel
    ended, _ = outcome_of(parcel, launched(0)[0])
    assert ended.type_name == "KeyError"


@pytest.mark.parametrize(
    ("error", "is_finished"),
    [(None, True), (RunStopped(), True), (SystemExit(0), True), (SystemExit(3), False)],
)
def test_what_was_put_off_is_done_however_the_function_is_left(error, is_finished):
    context, done = launched(0)[0], []
    context.before_return["it"] = lambda: done.append("it")
    parcel = payload.pack_call(leave, (error,)).parcel
    outcome_of(parcel, context)
    assert done == ["it"] * is_finished


def test_an_interrupt_after_the_result_was_packed_drops_nothing(monkeypatch):
    """Nobody else closes the segment of a result: it would stay for as long as the rank."""

    def pack_and_interrupt(packed):
        packet, fds = pack(packed)
        signal.raise_signal(signal.SIGINT)
        return packet, fds

    parcel = payload.pack_call(bytes, (MAX_INLINE_BYTES + 1,)).parcel
    monkeypatch.setattr(main, "pack", pack_and_interrupt)
    ended, [fd] = outcome_of(parcel, launched(0)[0])
    os.close(fd)
    assert isinstance(ended, wire.Returned)


def test_an_interrupt_from_before_the_call_was_read_keeps_nothing_of_it():
    """A session would have its arguments in memory to its end."""
    large = bytearray(MAX_INLINE_BYTES + 1)
    parcel = payload.pack_call(len, (large,)).parcel
    before = open_descriptors()
    ended, _ = outcome_of(parcel, launched(0)[0], is_interrupted=True)
    assert ended.kind == "interrupted"
    assert parcel.fds
    assert not [one for one in open_descriptors() - before if "memfd:notebook_accel" in one]
