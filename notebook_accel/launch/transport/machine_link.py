"""The connection between the notebook and another machine of a run: TLS, authenticated by a token.

    notebook                                        the machine that joins
    listens, with a self-signed certificate
                             <-- TLS --             compares the certificate with the token
                             <-- version, secret    from the token
                             <-- MachineJoined
    StartMachineAgent -->                           has an agent forked
    channel of the run <====== frames ======>       channel of the agent

The person copies the token from the notebook to the other machine. It holds the fingerprint of the
certificate and a secret, so that each end can authenticate the other; the notebook decodes no
message before it has compared the secret. A broken link is noticed within some seconds: the system
sends keepalive probes, which the other system answers even while the process there is busy or
stopped, and data that is not acknowledged for five seconds ends the connection.

One background thread with an event loop serves all connections of this process. The channels of a
run (``frames.py``) do not know of the network: each uses a local socket, whose bytes this module
relays.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import os
import secrets
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from notebook_accel import wire
from notebook_accel.errors import ConfigError, LaunchError
from notebook_accel.launch.transport.channel import decode, encode
from notebook_accel.system.interrupts import held

T = TypeVar("T")

HANDSHAKE_SECONDS = 10.0
_POLL_SECONDS = 0.01
_LOOK_SECONDS = 1.0
_MAX_SILENT_MS = 5_000
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 5),
)
# Of Linux's struct tcp_info: unanswered probes of a full receiver; packets that are not
# acknowledged; milliseconds since the last acknowledgement.
_TCP_INFO = struct.Struct("3x B 20x I 28x I")
_FRAME = struct.Struct("!cI")
_DATA, _MESSAGE = b"d", b"m"
_MAX_FRAME = 1 << 26
_CHUNK = 1 << 18
_SECRET = 16
_FINGERPRINT = 32
_MAGIC = b"notebook-accel %03d" % wire.VERSION


# ---- One thread for all connections --------------------------------------------------------


_loop: asyncio.AbstractEventLoop | None = None
_loop_lock = threading.Lock()


def in_background() -> asyncio.AbstractEventLoop:
    """Return the asyncio loop that serves all connections, in a background thread."""
    global _loop
    with held(), _loop_lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            # What a port scan leaves behind is nobody's concern.
            _loop.set_exception_handler(lambda *_: None)
            threading.Thread(target=_loop.run_forever, name="machines", daemon=True).start()
        return _loop


def await_from_thread(work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
    """Run a coroutine in the background loop and wait for it; return its result or raise its error.

    To be called in any thread but the loop's. The wait can be interrupted (KeyboardInterrupt),
    which cancels the coroutine.

    Raises:
        TimeoutError: the coroutine took longer than ``timeout``, and was cancelled.
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
    """The credentials by which a joining machine and the notebook authenticate each other."""

    secret: bytes
    fingerprint: bytes

    @classmethod
    def new(cls, fingerprint: bytes) -> Token:
        """Return a token with a fresh random secret, for a certificate with this fingerprint."""
        token = cls(secret=secrets.token_bytes(_SECRET), fingerprint=fingerprint)
        # A command line would take it for an option.
        return cls.new(fingerprint) if str(token).startswith("-") else token

    @classmethod
    def of_text(cls, text: str) -> Token:
        """Parse a token from its text."""
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
    """Return a TLS context for the notebook, and its certificate's SHA-256 fingerprint."""
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
    """Make a self-signed certificate."""
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
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    encoding = serialization.Encoding
    return private + certificate.public_bytes(encoding.PEM), certificate.public_bytes(encoding.DER)


async def open_link(host: str, port: int, token: Token) -> MachineLink:
    """Connect this machine to the notebook at ``host`` and ``port``, and prove the token's secret.

    The secret is sent only if the notebook's certificate is the one of the token.

    Raises:
        OSError: no process listens at that port, or the process does not speak TLS.
        asyncio.TimeoutError: there was no connection within ten seconds.
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
    # The notebook checks both (check_proof).
    writer.write(_MAGIC + token.secret)
    return MachineLink(reader, writer)


async def check_proof(reader: asyncio.StreamReader, token: Token) -> str:
    """Check the version and secret that a joining machine sends; called by the notebook.

    Returns:
        Why the machine is refused, as a text to send to it; "" if it is admitted.

    Raises:
        EOFError: the peer closed the connection, or both its version and its secret are wrong, as
            those of a program that only scans ports. The caller sends it no answer.
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
    """One end of an authenticated connection between the notebook and another machine.

    It carries messages about the machine itself, and relays the bytes of one run's channel at a
    time. Call its methods only in the event loop's thread (:func:`in_background`).
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._local: asyncio.StreamWriter | None = None
        self.is_open = True
        self._socket = writer.get_extra_info("socket")
        for level, option, value in _KEEPALIVE:
            self._socket.setsockopt(level, option, value)
        self.own_address = str(writer.get_extra_info("sockname")[0])
        self.peer_address = str(writer.get_extra_info("peername")[0])

    def send(self, message: wire.Message) -> None:
        """Queue a message about the machine, for the loop to send; do nothing on a closed link."""
        self._write(_MESSAGE, encode(message))

    def _write(self, kind: bytes, data: bytes) -> None:
        if self.is_open:
            self._writer.write(_FRAME.pack(kind, len(data)) + data)

    async def serve(self, take: Callable[[wire.Message], None]) -> None:
        """Read until the connection ends or is found broken; then close this end.

        Bytes of a run's channel go to the socket given to :meth:`attach`.
        """
        watching = asyncio.ensure_future(self._watch())
        try:
            while True:
                kind, length = _FRAME.unpack(await self._reader.readexactly(_FRAME.size))
                if length > _MAX_FRAME:
                    raise EOFError("what came is no frame")
                data = await self._reader.readexactly(length)
                if kind == _MESSAGE:
                    take(decode(data))
                elif kind == _DATA and self._local is not None:
                    self._local.write(data)
                    with contextlib.suppress(OSError):  # the channel was closed meanwhile
                        await self._local.drain()
        except (OSError, EOFError, msgspec.MsgspecError):
            pass
        finally:
            watching.cancel()
            self.detach()
            self.close()

    async def _watch(self) -> None:
        """Abort the connection once the other system has not acknowledged data for five seconds.

        TCP_USER_TIMEOUT would do so as well for a process that is stopped and takes nothing.
        """
        while self.is_open:
            await asyncio.sleep(_LOOK_SECONDS)
            info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
            probes, unacknowledged, silent = _TCP_INFO.unpack(info)
            if silent > _MAX_SILENT_MS and (unacknowledged or probes > 1):
                self.abort()

    async def attach(self, sock: socket.socket) -> asyncio.Task[None]:
        """Relay the bytes of a run's channel over the link, in both directions.

        Args:
            sock: the local socket at whose other end the channel is; the link owns it from now on.

        Returns:
            The task that reads ``sock``; it ends when the channel closes its end.
        """
        reader, self._local = await asyncio.open_connection(sock=sock)
        return asyncio.ensure_future(self._pass_on(reader))

    async def _pass_on(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK):
                self._write(_DATA, data)
                await self._writer.drain()

    def detach(self) -> None:
        """Close the socket given to :meth:`attach`, once all bytes received for it are written.

        The channel at its other end reads these bytes, and then the end of the connection.
        """
        if self._local is not None:
            self._local.close()
            self._local = None

    def close(self) -> None:
        """Close the connection once everything queued has been sent."""
        self.is_open = False
        self._writer.close()

    def abort(self) -> None:
        """Close the connection now; queued messages and bytes are lost."""
        self.is_open = False
        # Python 3.11.2 raises it where the connection is closed already.
        with contextlib.suppress(AttributeError):
            self._writer.transport.abort()
