"""A pickled value comes back as it was, however large, and leaves no descriptor open."""

import os

import pytest

from notebook_accel import wire
from notebook_accel.launch.payload import Packed, pack, unpack
from notebook_accel.launch.transport.channel import decode, encode

pytestmark = pytest.mark.usefixtures("leaves_no_descriptor")
SMALL, LARGE = b"s" * 100, b"l" * 1_000_000


def carried(packet):
    """The packet after a journey in a message."""
    return decode(encode(wire.Returned(value=packet))).value


@pytest.mark.parametrize(
    "buffers",
    [(), (b"",), (SMALL, b"", SMALL), (SMALL, b"", b"odd", LARGE)],
    ids=["none", "an empty one", "small", "large"],
)
def test_a_value_comes_back_as_it_was(buffers):
    packet, fds = pack(Packed(tuple(map(memoryview, buffers))))
    assert bool(fds) == (sum(map(len, buffers)) > 65_536)
    assert len(encode(wire.Returned(value=packet))) < 70_000
    back = unpack(carried(packet), fds)
    assert [bytes(buffer) for buffer in back.buffers] == list(buffers)


@pytest.mark.parametrize("buffer", [SMALL, LARGE], ids=["inline", "segment"])
def test_buffers_are_writable_and_apart_from_the_senders(buffer):
    source = bytearray(buffer)
    packet, fds = pack(Packed((memoryview(source),)))
    source[0:2] = b"??"
    first, second = (unpack(packet, [os.dup(fd) for fd in fds]) for _ in range(2))
    for fd in fds:
        os.close(fd)
    first.buffers[0][0:2] = b"!!"
    assert bytes(second.buffers[0][:3]) == buffer[:3]
    assert bytes(first.buffers[0][:3]) == b"!!" + buffer[2:3]


def test_a_packet_that_is_not_whole_is_refused():
    packet, fds = pack(Packed((memoryview(LARGE),)))
    with pytest.raises(ValueError, match="1 buffers came with 0"):
        unpack(packet, ())
    longer = wire.Packet(sizes=(len(LARGE) * 2,))
    with pytest.raises(ValueError, match="bytes"):
        unpack(longer, fds)
