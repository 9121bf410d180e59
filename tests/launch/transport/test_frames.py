"""What are descriptors on one machine travels as bytes to another, whatever else is said."""

import os
import socket
import time

import pytest

from notebook_accel import wire
from notebook_accel.launch.payload import Packed, pack, unpack
from notebook_accel.launch.transport.channel import ProtocolError, encode
from notebook_accel.launch.transport.frames import FramedChannel
from tests.launch.transport.test_channel import frame

pytestmark = pytest.mark.usefixtures("leaves_no_descriptor")
SOON = 20.0
BIG = os.urandom(1 << 16) * 400  # 26 MB: more than sockets hold


@pytest.fixture
def pair():
    one, other = map(FramedChannel, socket.socketpair())
    yield one, other
    one.close()
    other.close()


def flow(one, other, until):
    """Let all flow between both until the condition holds; gives what ``other`` gave out."""
    got = []
    deadline = time.monotonic() + SOON
    while not until(got):
        assert time.monotonic() < deadline, f"{len(got)} messages came"
        one.flush(block=False)
        got += other.drain()
        assert one.drain() == []
    return got


def pump(one, other, num_messages):
    """What ``other`` gives out, until that are so many messages and all is written."""
    return flow(one, other, lambda got: len(got) >= num_messages and one.is_idle and other.is_idle)


def returned(rank, *contents):
    packet, fds = pack(Packed(tuple(map(memoryview, contents))))
    return wire.Returned(rank=rank, value=packet), fds


def post(channel, rank, content):
    message, fds = returned(rank, content)
    channel.post(message, fds)
    for fd in fds:
        os.close(fd)


def value(message, fds):
    return bytes(unpack(message.value, fds).buffers[0])


def text(message):
    return message.text


# ---- segments ------------------------------------------------------------------------------


def test_both_ways_at_once(pair):
    one, other = pair
    post(one, 0, BIG)
    post(other, 1, BIG[::-1])
    here = []
    there = []
    deadline = time.monotonic() + SOON
    while len(here) + len(there) < 2:
        assert time.monotonic() < deadline
        there += other.drain()
        here += one.drain()
        one.flush(block=False)
        other.flush(block=False)
    assert value(*there[0]) == BIG
    assert value(*here[0]) == BIG[::-1]


# ---- other messages meanwhile --------------------------------------------------------------


def test_a_message_that_is_posted_later_passes_a_large_value_of_another_rank(pair):
    one, other = pair
    one.post(wire.Notice(rank=0, text="before"))
    post(one, 0, BIG)
    one.flush(block=False)
    one.post(wire.Notice(rank=0, text="after"))
    post(one, 1, BIG[:100_000])
    one.post(wire.RankEnded(rank=2, exitcode=0))
    one.post(wire.RankEnded(rank=1, exitcode=0))
    one.post(wire.Kill(rank=0))
    got = pump(one, other, 7)
    assert [(message.rank, type(message).__name__) for message, _ in got] == [
        *((0, "Notice"), (2, "RankEnded"), (0, "Kill")),
        *((0, "Returned"), (0, "Notice"), (1, "Returned"), (1, "RankEnded")),
    ]
    assert value(*got[3]) == BIG
    assert value(*got[5]) == BIG[:100_000]


def test_what_an_agent_is_told_about_a_call_comes_after_the_call(pair):
    one, other = pair
    packet, fds = pack(Packed((memoryview(BIG),)))
    one.post(wire.BeginCall(call=1, payload=packet, grace=10), fds)
    for message in (wire.Stop(call=1), wire.Kill(call=1), wire.Shutdown()):
        one.post(message)
    got = pump(one, other, 4)
    names = [type(message).__name__ for message, _ in got]
    assert names == ["Kill", "BeginCall", "Stop", "Shutdown"]
    for fd in (*fds, *got[1][1]):
        os.close(fd)


def test_a_log_goes_on_while_a_value_is_sent(pair, tmp_path):
    one, other = pair
    source, copy = tmp_path / "source", tmp_path / "copy"
    source.write_bytes(b"a line\n")
    other.open_log = lambda _: os.open(copy, os.O_WRONLY | os.O_CREAT)
    with source.open("rb") as reading:
        one.follow(3, reading.fileno())
    post(one, 0, BIG)
    assert flow(one, other, lambda _: copy.exists() and copy.read_bytes()) == []
    assert copy.read_bytes() == b"a line\n"
    one.end(3)
    value(*pump(one, other, 1)[0])


# ---- files that grow -----------------------------------------------------------------------


def test_a_file_is_followed_to_its_end(pair, tmp_path):
    one, other = pair
    source, copy = tmp_path / "source", tmp_path / "copy"
    with source.open("wb", buffering=0) as log:
        log.write(b"before\n")
        with source.open("rb") as reading:
            one.follow(3, reading.fileno())
        copy.write_bytes(b"an attempt before\n")
        other.open_log = lambda rank: os.open(copy, os.O_WRONLY | os.O_APPEND) if rank == 3 else -1
        for part in (b"", b"more\n", BIG):
            log.write(part)
            size = 18 + source.stat().st_size
            assert flow(one, other, lambda _, size=size: copy.stat().st_size >= size) == []
        assert other.is_receiving
        log.write(b"last words")
        one.end(3)
        assert flow(one, other, lambda _: not other.is_receiving) == []
    assert copy.read_bytes() == b"an attempt before\nbefore\nmore\n" + BIG + b"last words"
    whole = other.logs[3]
    assert (whole.start, whole.received, whole.is_whole) == (18, source.stat().st_size, True)


# ---- a peer that goes, or talks nonsense ---------------------------------------------------


def test_what_is_not_whole_when_the_peer_goes_is_not_given_out(pair):
    one, other = pair
    one.post(wire.Notice(rank=0, text="before"))
    post(one, 0, BIG)
    one.post(wire.Notice(rank=0, text="after"))
    one.flush(block=False)
    one.close()
    assert [text(message) for message, _ in other.drain()] == ["before"]
    for _ in range(2):
        with pytest.raises(EOFError):
            other.drain()


@pytest.mark.parametrize(
    ("nonsense", "num_fds"),
    [(wire.Data(rank=0, data=b"uninvited"), 0), (wire.Notice(text="with a segment"), 1)],
)
def test_nonsense_ends_the_channel(nonsense, num_fds):
    peer, sock = socket.socketpair()
    channel = FramedChannel(sock)
    peer.sendall(frame(encode(wire.Notice(text="good"))))
    peer.sendall(frame(encode(nonsense), num_fds))
    assert [text(message) for message, _ in channel.drain()] == ["good"]
    with pytest.raises(ProtocolError):
        channel.drain()
    channel.close()
    peer.close()
