"""Nobody opens a channel without the run's secret, and nothing of a stranger is decoded."""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
from collections.abc import Callable
from typing import Any

import pytest

from notebook_accel import wire
from notebook_accel.launch.transport import channel as channels
from notebook_accel.launch.transport import handshake
from notebook_accel.launch.transport.channel import Channel
from notebook_accel.launch.transport.handshake import (
    AuthenticationError,
    accept,
    connect,
    new_secret,
)
from tests.launch.transport.test_channel import beside, notice, text_of

MAGIC = b"notebook-accel %03d" % wire.VERSION


def meet(first: Callable[[socket.socket], Any], second: Callable[[socket.socket], Any]) -> Any:
    """What both ends of a socket pair came to."""
    one, other = socket.socketpair()
    with one, other, beside(lambda: first(one)) as outcome:
        try:
            result = second(other)
        except NotImplementedError:
            raise
        except Exception as error:
            result = error
        other_end = outcome
    return other_end[0], result


def test_both_ends_prove_the_secret() -> None:
    secret = new_secret()
    one, other = meet(lambda s: accept(s, secret), lambda s: connect(s, secret))
    with contextlib.closing(one), contextlib.closing(other):
        assert isinstance(one, Channel)
        assert isinstance(other, Channel)


def test_after_the_handshake_messages_pass_both_ways() -> None:
    secret = new_secret()
    ours, theirs = socket.socketpair()
    with beside(lambda: accept(theirs, secret)) as made:
        one = connect(ours, secret)
    other: Channel = made[0]
    one.send(wire.Notice(text="hello"))
    other.send(wire.Notice(text="and back"))
    assert text_of(other.receive()[0]) == "hello"
    assert text_of(one.receive()[0]) == "and back"
    # Slow peers are waited for: the time-out was the handshake's own.
    assert ours.gettimeout() is None
    one.close()
    other.close()


def test_a_wrong_secret_on_either_side_opens_nothing() -> None:
    secret = new_secret()
    for mine, yours in ((secret, new_secret()), (new_secret(), secret)):
        one, other = meet(lambda s, k=mine: accept(s, k), lambda s, k=yours: connect(s, k))
        assert isinstance(one, AuthenticationError)
        assert isinstance(other, AuthenticationError)


def _impostor(sock: socket.socket) -> bytes:
    """Connects without the secret, by sending back what it was sent."""
    hello = sock.recv(len(MAGIC) + 32, socket.MSG_WAITALL)
    sock.sendall(hello[-32:] + hmac.digest(b"guess", hello, "sha256") + notice("decode me"))
    return sock.recv(100)


def _reflector(sock: socket.socket) -> bytes:
    """Accepts without the secret: replays the proof that it was sent."""
    sock.sendall(MAGIC + bytes(32))
    answer = sock.recv(64, socket.MSG_WAITALL)
    sock.sendall(answer[32:] + notice("decode me"))
    return sock.recv(100)


def test_guessed_and_replayed_proofs_open_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[bytes] = []
    monkeypatch.setattr(channels, "decode", decoded.append)
    theirs, ours = meet(_impostor, lambda s: accept(s, new_secret()))
    assert isinstance(ours, AuthenticationError)
    assert isinstance(theirs, ConnectionError) or theirs == b""
    theirs, ours = meet(_reflector, lambda s: connect(s, new_secret()))
    assert isinstance(ours, AuthenticationError)
    assert decoded == []


def test_another_version_is_named() -> None:
    def old(sock: socket.socket) -> None:
        sock.sendall(b"notebook-accel 000" + bytes(32))

    _, ours = meet(old, lambda s: connect(s, new_secret()))
    assert isinstance(ours, AuthenticationError)
    assert "version" in str(ours)


@pytest.mark.parametrize("side", [accept, connect])
def test_garbage_before_the_handshake(side: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[bytes] = []
    monkeypatch.setattr(channels, "decode", decoded.append)

    def noise(sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            sock.sendall(notice("before the proof") + os.urandom(500))

    _, ours = meet(noise, lambda s: side(s, new_secret()))
    assert isinstance(ours, AuthenticationError)
    assert decoded == []


@pytest.mark.parametrize("side", [accept, connect])
def test_a_silent_peer_is_given_up_after_the_time_out(
    side: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "_HANDSHAKE_SECONDS", 0.05)
    ours, theirs = socket.socketpair()
    with theirs, pytest.raises(AuthenticationError):
        side(ours, new_secret())
    assert ours.fileno() == -1
