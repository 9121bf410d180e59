"""What are descriptors on one machine travels as bytes to another, whatever else is said."""

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from notebook_accel import wire
from notebook_accel.launch.payload import Packed, pack, unpack
from notebook_accel.launch.transport.channel import ProtocolError, encode
from notebook_accel.launch.transport.frames import FramedChannel
from tests.descriptors import open_descriptors
from tests.launch.transport.test_channel import frame

SOON = 20.0
BIG = os.urandom(1 << 16) * 400  # 26 MB: more than sockets hold


@pytest.fixture(autouse=True)
def _leaves_no_descriptor() -> Iterator[None]:
    before = open_descriptors()
    yield
    assert not open_descriptors() - before


@pytest.fixture
def pair() -> Iterator[tuple[FramedChannel, FramedChannel]]:
    one, other = map(FramedChannel, socket.socketpair())
    yield one, other
    one.close()
    other.close()


Got = list[tuple[wire.Message, list[int]]]


def pump(one: FramedChannel, other: FramedChannel, until: int) -> Got:
    """What ``other`` gives out, until that are ``until`` messages and all is written."""
    got: Got = []
    deadline = time.monotonic() + SOON
    while len(got) < until or not (one.is_idle and other.is_idle):
        assert time.monotonic() < deadline, f"{len(got)} messages came"
        one.flush(block=False)
        got += other.drain()
        assert one.drain() == []
    return got


def returned(rank: int, *contents: bytes) -> tuple[wire.Returned, tuple[int, ...]]:
    packet, fds = pack(Packed(tuple(map(memoryview, contents))))
    return wire.Returned(rank=rank, value=packet), fds


def post(channel: FramedChannel, rank: int, content: bytes) -> None:
    message, fds = returned(rank, content)
    channel.post(message, fds)
    for fd in fds:
        os.close(fd)


def value(message: wire.Message, fds: list[int]) -> bytes:
    assert isinstance(message, wire.Returned)
    return bytes(unpack(message.value, fds).buffers[0])


def text(message: wire.Message) -> str:
    assert isinstance(message, wire.Notice)
    return message.text


# ---- segments ------------------------------------------------------------------------------


def test_both_ways_at_once(pair: tuple[FramedChannel, FramedChannel]) -> None:
    one, other = pair
    post(one, 0, BIG)
    post(other, 1, BIG[::-1])
    here: Got = []
    there: Got = []
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


def test_a_message_that_is_posted_later_passes_a_large_value(
    pair: tuple[FramedChannel, FramedChannel],
) -> None:
    one, other = pair
    post(one, 0, BIG)
    one.flush(block=False)
    one.post(wire.Kill(rank=0))
    one.post(wire.Notice(rank=1, text="of another rank"))
    got = pump(one, other, 3)
    assert [type(message).__name__ for message, _ in got] == ["Kill", "Notice", "Returned"]
    assert value(*got[2]) == BIG


def test_what_an_agent_is_told_about_a_call_comes_after_the_call(
    pair: tuple[FramedChannel, FramedChannel],
) -> None:
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


def test_what_is_said_of_a_rank_later_comes_later(
    pair: tuple[FramedChannel, FramedChannel],
) -> None:
    one, other = pair
    one.post(wire.Notice(rank=0, text="before"))
    post(one, 0, BIG)
    one.post(wire.Notice(rank=0, text="between"))
    post(one, 0, BIG[:100_000])
    one.post(wire.RankEnded(rank=0, exitcode=0))
    one.post(wire.RankEnded(rank=1, exitcode=0))
    got = pump(one, other, 6)
    assert [(message.rank, type(message).__name__) for message, _ in got] == [
        (0, "Notice"),
        (1, "RankEnded"),
        (0, "Returned"),
        (0, "Notice"),
        (0, "Returned"),
        (0, "RankEnded"),
    ]
    assert [len(value(*entry)) for entry in got if entry[1]] == [len(BIG), 100_000]


def test_a_small_value_does_not_wait_for_a_large_one(
    pair: tuple[FramedChannel, FramedChannel],
) -> None:
    one, other = pair
    post(one, 0, BIG)
    post(one, 1, BIG[:100_000])
    got = pump(one, other, 2)
    assert [message.rank for message, _ in got] == [1, 0]
    for message, fds in got:
        value(message, fds)


# ---- files that grow -----------------------------------------------------------------------


def test_a_file_is_followed_to_its_end(
    pair: tuple[FramedChannel, FramedChannel], tmp_path: Path
) -> None:
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
            deadline = time.monotonic() + SOON
            while copy.stat().st_size < 18 + source.stat().st_size:
                assert time.monotonic() < deadline
                one.flush(block=False)
                assert other.drain() == []
        assert other.is_receiving
        log.write(b"last words")
        one.end(3)
        while other.is_receiving:
            assert time.monotonic() < deadline
            one.flush(block=False)
            assert other.drain() == []
    assert copy.read_bytes() == b"an attempt before\nbefore\nmore\n" + BIG + b"last words"
    whole = other.logs[3]
    assert (whole.start, whole.received, whole.is_whole) == (18, source.stat().st_size, True)


# ---- a peer that goes, or talks nonsense ---------------------------------------------------


def test_what_is_not_whole_when_the_peer_goes_is_not_given_out(
    pair: tuple[FramedChannel, FramedChannel],
) -> None:
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
    "nonsense",
    [
        [wire.Data(stream=5, data=b"never opened")],
        [wire.StreamOpened(stream=1, size=-1)],
        [wire.StreamOpened(stream=1, size=4), wire.StreamOpened(stream=1, size=4)],
        [wire.StreamOpened(stream=1, size=4), wire.Data(stream=1, data=b"longer", last=True)],
        [wire.StreamOpened(stream=1, size=4), wire.Data(stream=1, data=b"cut", last=True)],
        [wire.StreamOpened(stream=1, rank=0)],
    ],
    ids=["unknown", "negative", "twice", "too long", "too short", "uninvited"],
)
def test_nonsense_ends_the_channel(nonsense: list[wire.Message]) -> None:
    peer, sock = socket.socketpair()
    channel = FramedChannel(sock)
    for message in (wire.Notice(text="good"), *nonsense):
        peer.sendall(frame(encode(message)))
    assert [text(message) for message, _ in channel.drain()] == ["good"]
    with pytest.raises(ProtocolError):
        channel.drain()
    channel.close()
    peer.close()
