"""What a message keeps of a text, and that nothing but messages is decoded."""

import msgspec
import pytest

from notebook_accel import wire
from notebook_accel.launch.transport.channel import decode, encode


def test_half_characters_for_a_person_are_spelled():
    raised = wire.Raised(kind="exception", type_name="E", text="\ud800 fü", traceback="")
    assert decode(encode(raised)).text == "\\ud800 fü"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x80",
        msgspec.msgpack.encode({"type": "Nothing"}),
        msgspec.msgpack.encode({"type": "Message"}),
        msgspec.msgpack.encode({"type": "Notice"}),
        msgspec.msgpack.encode({"text": "no type"}),
        msgspec.msgpack.encode({"type": "Notice", "text": [{"no": "text"}]}),
        msgspec.msgpack.encode(["Notice", "text"]),
        encode(wire.Interrupt()) + b"more",
        b"\xff" * 100,
        encode(wire.Notice(text="12345678")).replace(b"12345678", b"\xff" * 8),
    ],
    # A message has its time in it: each of several test processes would name it otherwise.
    ids=range(12),
)
def test_what_is_no_message(data):
    with pytest.raises(msgspec.MsgspecError):
        decode(data)
