"""Messages as bytes: msgpack, decoded into the types of ``wire.py`` and nothing else."""

from __future__ import annotations

from typing import Union

import msgspec

from notebook_accel.launch import wire
from notebook_accel.launch.text.odd_text import escaped, unwrapped, wrapped

__all__ = ["decode", "encode"]

_encoder = msgspec.msgpack.Encoder()
# The closed union of all messages: it is built once, before anybody could add one.
_decoder: msgspec.msgpack.Decoder[wire.Message] = msgspec.msgpack.Decoder(
    Union[tuple(wire.Message.__subclasses__())]
)
# Their texts name folders and variables, which must arrive byte for byte.
_OF_SURROUNDINGS = (wire.Launch, wire.CountDevices)


def encode(message: wire.Message) -> bytes:
    """The bytes of one message; what becomes of text that is not UTF-8 is said in odd_text.py."""
    try:
        return _encoder.encode(message)
    except UnicodeEncodeError:
        change = wrapped if isinstance(message, _OF_SURROUNDINGS) else escaped
        return _encoder.encode(change(msgspec.to_builtins(message, builtin_types=(bytes,))))


def decode(data: bytes | memoryview) -> wire.Message:
    """The message in ``data``.

    Raises:
        msgspec.DecodeError: the bytes are no message of this version.
    """
    try:
        message = _decoder.decode(data)
    except (UnicodeDecodeError, RecursionError) as error:  # which msgspec lets through
        raise msgspec.DecodeError(f"it cannot be read: {error}") from None
    if not isinstance(message, _OF_SURROUNDINGS):
        return message
    try:
        fields = unwrapped(msgspec.to_builtins(message, builtin_types=(bytes,)))
    except ValueError as error:
        raise msgspec.DecodeError(f"a text is none: {error}") from None
    return msgspec.convert(fields, type(message))
