"""The connection between the notebook and another machine of a run: TLS, a token, bytes both ways.

    notebook                                        the machine that joins
    listens, with a certificate of its own
                             <-- TLS --             compares the certificate with the token
                             <-- version, secret    of the token
                             <-- MachineJoined
    StartMachineAgent -->                           has an agent forked
    channel of the run <====== frames ======>       channel of the agent

A token holds the fingerprint of the certificate and a secret, so that each end knows the other:
nothing of a connection is decoded before its secret was compared. From then on both ends send a
heartbeat every second. A connection whose other end stays silent is dead, whatever TCP says: a link
that went down with bytes under way would keep TCP trying for a quarter of an hour.

All connections of this process are served by one thread with an event loop. The channels at the
ends (``frames.py``) know nothing of it: theirs are local sockets.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import os
import secrets
import ssl
import struct
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from notebook_accel.errors import ConfigError, LaunchError
from notebook_accel.launch import wire
from notebook_accel.launch.system.interrupts import held
from notebook_accel.launch.transport.channel import decode, encode

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Coroutine

__all__ = [
    "HANDSHAKE_SECONDS",
    "MachineLink",
    "Token",
    "await_from_thread",
    "in_background",
    "open_link",
    "prove",
    "server_context",
    "check_proof",
]

T = TypeVar("T")

HANDSHAKE_SECONDS = 10.0
_POLL_SECONDS = 0.01
_BEAT_SECONDS = 1.0
# Heartbeats that may be missing. Counted by our own beats, so that a process that was held up does
# not blame the other.
_MAX_MISSING = 5
_FRAME = struct.Struct("!cI")
_DATA, _MESSAGE, _BEAT = b"d", b"m", b"b"
_MAX_FRAME = 1 << 26
_CHUNK = 1 << 18
_SECRET = 16
_FINGERPRINT = 32
_MAGIC = b"notebook-accel %03d" % wire.VERSION


# ---- One thread for all connections --------------------------------------------------------


_loop: asyncio.AbstractEventLoop | None = None
_loop_lock = threading.Lock()


def in_background() -> asyncio.AbstractEventLoop:
    """Return the event loop of all connections; the first call starts its thread."""
    global _loop
    with held(), _loop_lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            # What a port scan leaves behind is nobody's concern.
            _loop.set_exception_handler(lambda *_: None)
            threading.Thread(target=_loop.run_forever, name="machines", daemon=True).start()
        return _loop


def await_from_thread(work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
    """Run ``work`` in the background loop; return its result, or raise its error.

    Raises:
        TimeoutError: it takes longer than ``timeout`` seconds; it is cancelled.
    """
    future = asyncio.run_coroutine_threadsafe(work, in_background())
    deadline = None if timeout is None else time.monotonic() + timeout
    try:
        # An interrupt inside of `future.result` could leave its lock locked.
        while not future.done():
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError
            time.sleep(_POLL_SECONDS)
    finally:
        future.cancel()
    return future.result()


# ---- Who is at the other end ---------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Token:
    """The secret and certificate fingerprint with which a machine joins."""

    secret: bytes
    fingerprint: bytes

    @classmethod
    def new(cls, fingerprint: bytes) -> Token:
        """Return a token with a fresh secret."""
        return cls(secret=secrets.token_bytes(_SECRET), fingerprint=fingerprint)

    @classmethod
    def of_text(cls, text: str) -> Token:
        """Parse a token from its text.

        Raises:
            ConfigError: it is none. The error does not repeat it.
        """
        try:
            data = base64.b64decode(text.strip(), altchars=b"-_", validate=True)
        except ValueError:
            data = b""
        if len(data) != _SECRET + _FINGERPRINT:
            raise ConfigError(
                f"the join token has {len(text.strip())} characters that are no token: expected "
                "the 64 that the notebook shows, copied whole"
            )
        return cls(secret=data[:_SECRET], fingerprint=data[_SECRET:])

    def __str__(self) -> str:
        return base64.urlsafe_b64encode(self.secret + self.fingerprint).decode()


def server_context() -> tuple[ssl.SSLContext, bytes]:
    """Return a TLS context with a fresh certificate, and the certificate's fingerprint.

    Raises:
        LaunchError: the package that makes certificates is not installed.
    """
    try:
        pem, der = _new_certificate()
    except ImportError:
        raise LaunchError(
            "several machines need the package cryptography, for the certificate of their "
            "connection: pip install 'notebook-accel[elastic]', then launch again"
        ) from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # ssl reads files alone; the key must be on no disk.
    fd = os.memfd_create("certificate")
    try:
        os.write(fd, pem)
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
    return context, hashlib.sha256(der).digest()


def _new_certificate() -> tuple[bytes, bytes]:
    """Return (private key and certificate as PEM, certificate as DER)."""
    from datetime import datetime, timedelta, timezone

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "notebook-accel")])
    # The machines compare the fingerprint and no dates: their clocks may differ.
    now = datetime.now(timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=365))
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    encoding = serialization.Encoding
    return private + certificate.public_bytes(encoding.PEM), certificate.public_bytes(encoding.DER)


async def open_link(host: str, port: int, token: Token) -> MachineLink:
    """Connect to the notebook that has the token's certificate; send nothing to any other.

    Raises:
        LaunchError: it is another one.
        OSError: nobody listens there, or it does not speak TLS.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Known by its fingerprint, not by its name.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    opening = asyncio.open_connection(host, port, ssl=context)
    reader, writer = await asyncio.wait_for(opening, HANDSHAKE_SECONDS)
    der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    if not hmac.compare_digest(hashlib.sha256(der).digest(), token.fingerprint):
        writer.transport.abort()
        raise LaunchError(
            f"what listens at {host}:{port} is not the launch that this token is of: take the "
            "command that the notebook shows now"
        )
    prove(writer, token)
    return MachineLink(reader, writer)


def prove(writer: asyncio.StreamWriter, token: Token) -> None:
    """Send the protocol's version and the token's secret, by which the notebook admits us."""
    writer.write(_MAGIC + token.secret)


async def check_proof(reader: asyncio.StreamReader, token: Token) -> str:
    """Read the version and secret that a machine sends, and check them.

    Returns:
        Why it is refused; "" where it is not.

    Raises:
        EOFError: it said nothing, or is none of ours: it gets no answer.
    """
    proof = await reader.readexactly(len(_MAGIC) + _SECRET)
    is_of_version = proof[: len(_MAGIC)] == _MAGIC
    if not hmac.compare_digest(proof[len(_MAGIC) :], token.secret):
        if is_of_version:
            return "its token is not the one of this launch: copy the whole command that is shown"
        raise EOFError("the secret is wrong")
    if not is_of_version:
        return "the notebook has another version of notebook_accel: install one version on both"
    return ""


# ---- The connection ------------------------------------------------------------------------


class MachineLink:
    """One end of a connection between machines whose other end has been authenticated.

    Its methods are for the thread of :func:`in_background`.

    Attributes:
        is_open: whether the other end can be reached, as far as is known.
        own_address, peer_address: of this end and the other.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._local: asyncio.StreamWriter | None = None
        self._is_reading = self._has_heard = False
        self.is_open = True
        self.own_address = str(writer.get_extra_info("sockname")[0])
        self.peer_address = str(writer.get_extra_info("peername")[0])

    def send(self, message: wire.Message) -> None:
        """Send a message."""
        self._write(_MESSAGE, encode(message))

    def _write(self, kind: bytes, data: bytes = b"") -> None:
        if self.is_open:
            self._writer.write(_FRAME.pack(kind, len(data)) + data)

    async def serve(self, take: Callable[[wire.Message], None]) -> None:
        """Read until the connection ends; messages go to ``take``, and bytes to the channel."""
        beating = asyncio.ensure_future(self._beat())
        try:
            while True:
                kind, data = await self._read()
                if kind == _MESSAGE:
                    take(decode(data))
                elif kind == _DATA and self._local is not None:
                    self._local.write(data)
                    with contextlib.suppress(OSError):  # the channel was closed meanwhile
                        await self._local.drain()
        except (OSError, EOFError, msgspec.MsgspecError):
            pass
        finally:
            beating.cancel()
            self.detach()
            self.close()

    async def _read(self) -> tuple[bytes, bytes]:
        self._is_reading = True
        kind, length = _FRAME.unpack(await self._reader.readexactly(_FRAME.size))
        if length > _MAX_FRAME:
            raise EOFError("what came is no frame")
        data = await self._reader.readexactly(length)
        self._is_reading, self._has_heard = False, True
        return kind, data

    async def _beat(self) -> None:
        """Send heartbeats; close the connection if none arrive."""
        num_missing = 0
        while num_missing < _MAX_MISSING:
            self._write(_BEAT)
            await asyncio.sleep(_BEAT_SECONDS)
            # While a channel takes its bytes slowly, nothing is read.
            is_silent = self._is_reading and not self._has_heard
            num_missing = num_missing + 1 if is_silent else 0
            self._has_heard = False
        self.abort()

    async def attach(self, sock: socket.socket) -> asyncio.Task[None]:
        """Relay a channel's socket over the link, both ways; the task ends when it is closed."""
        reader, self._local = await asyncio.open_connection(sock=sock)
        return asyncio.ensure_future(self._pass_on(reader))

    async def _pass_on(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK):
                self._write(_DATA, data)
                await self._writer.drain()

    def detach(self) -> None:
        """Close the link's end of the attached channel, which still reads what was sent before."""
        if self._local is not None:
            self._local.close()
            self._local = None

    def close(self) -> None:
        """Close the connection once everything queued has been sent."""
        self.is_open = False
        self._writer.close()

    def abort(self) -> None:
        """Close the connection now; what is queued is lost."""
        self.is_open = False
        self._writer.transport.abort()
