"""Every message survives its encoding, and nothing else is decoded."""

import typing

import msgspec
import pytest

from notebook_accel import wire
from notebook_accel.launch.transport.channel import decode, encode

HEAD = {"run": "r", "call": 2, "process": 3, "rank": 4, "monotonic": 6.5, "wall": 7.5}
MESSAGES = sorted(wire.Message.__subclasses__(), key=lambda kind: kind.__name__)


STRUCTS = {
    wire.Packet: wire.Packet(sizes=(1, 2), inline=(b"a", b"bc")),
    wire.ImportItem: wire.ImportItem("a.b", ("c", "d")),
    wire.Passed: wire.Passed(batches=3, reads_should_stop=True),
    wire.Point: wire.Point(batches=4),
    wire.Usage: wire.Usage(batches=3, device="cpu"),
    wire.StepTimes: wire.StepTimes(num_steps=3, total=100, data=7, data_wait=5),
    wire.Metric: wire.Metric(rank=1, values={"loss": 0.5}, step=7),
    wire.Collective: wire.Collective(
        group="0 nccl",
        number=5,
        operation="all_reduce",
        sizes="[3]",
        is_pending=True,
        frames=(("a.py", 3, "f"),),
    ),
}


def _example(hint):
    """A value of a field's type that is not its default."""
    if typing.get_origin(hint) is tuple:
        return (_example(typing.get_args(hint)[0]),) * 2
    if typing.get_origin(hint) is list:
        return [_example(typing.get_args(hint)[0])]
    if typing.get_origin(hint) is dict:
        key, value = typing.get_args(hint)
        return {_example(key): _example(value)}
    for choice in typing.get_args(hint):
        if choice is not type(None):
            return _example(choice)
    if hint in STRUCTS:
        return STRUCTS[hint]
    return {int: 42, float: 0.1, str: "täxt\x00", bytes: b"\x00\xff", bool: True}[hint]


def _full(kind):
    hints = typing.get_type_hints(kind)
    own = {name: _example(hints[name]) for name in kind.__struct_fields__ if name not in HEAD}
    return kind(**{**HEAD, **own})


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_a_message_survives(kind):
    message = _full(kind)
    decoded = decode(encode(message))
    assert type(decoded) is kind
    assert decoded == message
    assert decode(memoryview(encode(message))) == message


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_a_field_of_another_type_is_an_error(kind):
    raw = msgspec.msgpack.decode(encode(_full(kind)))
    for name in kind.__struct_fields__:
        broken = msgspec.msgpack.encode({**raw, name: [{"no": "such thing"}, None]})
        with pytest.raises(msgspec.DecodeError):
            decode(broken)


def test_numbers_that_json_does_not_have():
    values = {"nan": float("nan"), "inf": float("inf"), "minus": float("-inf"), "whole": 3}
    decoded = decode(encode(wire.Metric(values=values)))
    assert repr(decoded.values) == "{'nan': nan, 'inf': inf, 'minus': -inf, 'whole': 3.0}"


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
        msgspec.msgpack.encode(["Notice", "text"]),
        encode(wire.Interrupt()) + b"more",
        b"\xff" * 100,
        encode(wire.Notice(text="12345678")).replace(b"12345678", b"\xff" * 8),
    ],
    # A message has its time in it: each of several test processes would name it otherwise.
    ids=range(11),
)
def test_what_is_no_message(data):
    with pytest.raises(msgspec.MsgspecError):
        decode(data)
