"""A channel carries whole messages, and nothing of a peer that is not what it should be."""

import contextlib
import os
import socket
import struct
import sys
import threading
import time

import pytest

from notebook_accel import wire
from notebook_accel.launch.transport import channel as channels
from notebook_accel.launch.transport.channel import Channel, ProtocolError, encode

pytestmark = pytest.mark.usefixtures("leaves_no_descriptor")
SOON = 30.0


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    one, other = Channel(ours), Channel(theirs)
    yield one, other
    one.close()
    other.close()


@pytest.fixture
def raw():
    """A peer that may send anything, and the channel that hears it."""
    theirs, ours = socket.socketpair()
    channel = Channel(ours)
    yield theirs, channel
    theirs.close()
    channel.close()


def text_of(message):
    return message.text


def frame(body, num_fds=0):
    return struct.pack("!IB", len(body), num_fds) + body


def notice(text):
    return frame(encode(wire.Notice(text=text)))


# ---- messages ------------------------------------------------------------------------------


def test_a_write_that_is_broken_off_anywhere_goes_on_where_it_stopped(pair, tmp_path):
    """As by a signal handler that raises, before each single step of the code."""
    ours, theirs = pair
    instant, broken_off = 0, True
    with open(tmp_path / "file", "w") as file:
        while broken_off:
            instant += 1
            ours.post(wire.Notice(text=f"{instant}"), [file.fileno()])
            broken_off = _raises_at(instant, ours.flush)
            ours.send(wire.RankReady())
            (notice, fds), (ready, _) = theirs.receive(), theirs.receive()
            assert notice.text == f"{instant}"
            assert os.path.samestat(os.fstat(fds[0]), os.fstat(file.fileno()))
            os.close(fds[0])
            assert isinstance(ready, wire.RankReady)
    assert instant > 50


def _raises_at(instant, act):
    """Call ``act`` and break it off before that step of the channel's code; False past its end."""
    num_steps = 0

    def trace(frame, event, _):
        nonlocal num_steps
        if frame.f_code.co_filename != channels.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            num_steps += 1
            if num_steps == instant:
                raise InterruptedError
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 looks for it only in settrace
    sys.settrace(trace)
    try:
        act()
    except InterruptedError:
        return True
    finally:
        sys.settrace(before)
    return False


def test_frames_split_at_any_byte(raw):
    peer, channel = raw
    data = notice("first") + notice("second") + notice("")
    whole = []
    for cut in range(1, len(data)):
        texts = []
        for part in (data[:cut], data[cut:]):
            peer.sendall(part)
            texts += [text_of(message) for message, _ in channel.drain()]
        assert texts == ["first", "second", ""], cut
        whole += texts
    for byte in data:
        peer.sendall(bytes([byte]))
        whole += [text_of(message) for message, _ in channel.drain()]
    assert whole[-3:] == ["first", "second", ""]


# ---- descriptors ---------------------------------------------------------------------------


def test_closing_closes_what_was_not_taken_or_sent(pair):
    one, other = pair
    reading, writing = os.pipe()
    one.send(wire.Notice(text="half of it is read"), (writing,))
    one.post(wire.Notice(text="never sent"), (writing,))
    other._read(0)
    os.close(writing)
    one.close()
    other.close()
    one.close()
    assert os.read(reading, 1) == b""
    os.close(reading)


# ---- a peer that goes, or talks nonsense ---------------------------------------------------


def test_what_came_before_the_end_is_given_out(raw):
    peer, channel = raw
    peer.sendall(notice("last words") + notice("cut off")[:-1])
    peer.close()
    assert [text_of(message) for message, _ in channel.drain()] == ["last words"]
    for _ in range(2):
        with pytest.raises(EOFError):
            channel.drain()
    with pytest.raises(EOFError):
        channel.receive()


GARBAGE = {
    "no msgpack": frame(b"\xc1not msgpack"),
    "empty": frame(b""),
    "no type": frame(b"\x80"),
    "unknown type": frame(b"\x81\xa4type\xa4Nope"),
    "wrong field": frame(b"\x82\xa4type\xa6Notice\xa4text\x01"),
    "oversized": struct.pack("!IB", 0xFFFFFFFF, 0),
    "many descriptors": struct.pack("!IB", 10, 200),
    "noise": b"\xff" + os.urandom(300_000),
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
def test_garbage_ends_the_channel_after_what_came_before(raw, garbage):
    peer, channel = raw

    def send():
        with contextlib.suppress(OSError):
            peer.sendall(notice("good") + garbage + notice("after"))

    sending = threading.Thread(target=send, daemon=True)
    sending.start()
    assert text_of(channel.receive()[0]) == "good"
    for _ in range(2):
        with pytest.raises(ProtocolError):
            drain_for_ever(channel)
    with pytest.raises(ProtocolError):
        channel.receive()
    channel.close()
    sending.join(SOON)
    assert not sending.is_alive(), "the other end hangs"


def drain_for_ever(channel):
    deadline = time.monotonic() + SOON
    while time.monotonic() < deadline:
        assert channel.drain() == []
