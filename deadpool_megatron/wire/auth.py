"""Mutual challenge-response with the run secret, before any other message of a TCP connection.

Each side proves that it knows the secret without sending it: HMAC-SHA256 over a direction label,
the realm (the run, and which of its services is meant), and the nonces of both sides. So a recorded
answer, one reflected to its sender, and one got from another service are useless. The run secret is
made by the launcher (file ``secret`` in the run directory, mode 0600) or given in
``DEADPOOL_SECRET``.

Nothing behind the handshake is authenticated or encrypted by it; where somebody may sit between two
nodes, that takes TLS (:mod:`~deadpool_megatron.wire.tls`).
"""

from __future__ import annotations

import asyncio
import hmac
import os
import re
import secrets
import socket
from pathlib import Path
from typing import Any

from deadpool_megatron import ownership
from deadpool_megatron.wire import framing
from deadpool_megatron.wire.framing import ConnectionClosed, WireError
from deadpool_megatron.wire.tls import Tls

ENVIRONMENT_NAME = "DEADPOOL_SECRET"
# A stranger's first frame may be no larger than a challenge needs.
_HANDSHAKE_BYTES = 4096
_NONCE = re.compile(r"[0-9a-f]{32}")
_LEAST_SECRET_BYTES = 16


class AuthenticationError(WireError):
    """The peer does not know the run secret, or belongs to another run."""


def load_secret(run_directory: Path) -> bytes:
    """The run secret from the environment or the run directory.

    Raises AuthenticationError when there is none, its file is not of this user alone, or it is so
    short that it could be guessed. White space around it does not count.
    """
    text = os.environ.get(ENVIRONMENT_NAME)
    if text:
        return _checked(text.encode().strip(), ENVIRONMENT_NAME)
    path = run_directory / "secret"
    try:
        with os.fdopen(ownership.open_own(path, secret=True), "rb") as file:
            return _checked(file.read().strip(), str(path))
    except ownership.OwnershipError as error:
        raise AuthenticationError(str(error)) from error
    except OSError as error:
        raise AuthenticationError(
            f"no run secret: set {ENVIRONMENT_NAME} or make {path} readable ({error.strerror})"
        ) from error


def create_secret(run_directory: Path) -> None:
    """Write a fresh secret, mode 0600, unless one exists already; nobody ever reads half of it."""
    temporary = run_directory / f".secret.{os.getpid()}.{secrets.token_hex(4)}"
    handle = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(secrets.token_hex(32).encode())
        os.link(temporary, run_directory / "secret")
    except FileExistsError:
        pass  # another agent of the run was first
    finally:
        temporary.unlink()


def _checked(secret: bytes, place: str) -> bytes:
    if len(secret) < _LEAST_SECRET_BYTES:
        raise AuthenticationError(
            f"the run secret in {place} has less than {_LEAST_SECRET_BYTES} characters: make one"
            " with 'openssl rand -hex 32'"
        )
    return secret


def _proof(secret: bytes, label: str, realm: str, ours: str, theirs: str) -> str:
    return hmac.new(secret, f"{label}|{realm}|{ours}|{theirs}".encode(), "sha256").hexdigest()


def _nonce_of(message: dict[str, Any]) -> str:
    """The other side's nonce; anything but 16 bytes in hexadecimal is refused."""
    nonce = message.get("nonce")
    if not isinstance(nonce, str) or not _NONCE.fullmatch(nonce):
        raise AuthenticationError("peer sent no proper nonce")
    return nonce


class Handshake:
    """The three messages as pure data, shared by the blocking and the asyncio form."""

    def __init__(self, secret: bytes, realm: str) -> None:
        self._secret = secret
        self._realm = realm
        self._nonce = secrets.token_hex(16)
        self._peer_nonce = ""

    def hello(self) -> dict[str, Any]:
        """First message, of the connecting side."""
        return {"t": "hello", "run": self._realm, "nonce": self._nonce}

    def challenge(self, hello: dict[str, Any]) -> dict[str, Any]:
        """Second message, of the accepting side: its nonce and its proof."""
        if hello.get("t") != "hello" or hello.get("run") != self._realm:
            raise AuthenticationError("peer belongs to another run")
        self._peer_nonce = _nonce_of(hello)
        proof = _proof(self._secret, "accept", self._realm, self._nonce, self._peer_nonce)
        return {"t": "challenge", "nonce": self._nonce, "proof": proof}

    def answer(self, challenge: dict[str, Any]) -> dict[str, Any]:
        """Third message, of the connecting side, after it has checked the other's proof."""
        self._peer_nonce = _nonce_of(challenge)
        self._check(challenge, "challenge", "accept")
        proof = _proof(self._secret, "connect", self._realm, self._nonce, self._peer_nonce)
        return {"t": "answer", "proof": proof}

    def verify(self, answer: dict[str, Any]) -> None:
        """The accepting side's check of the third message."""
        self._check(answer, "answer", "connect")

    def _check(self, message: dict[str, Any], kind: str, label: str) -> None:
        wanted = _proof(self._secret, label, self._realm, self._peer_nonce, self._nonce)
        # As bytes: text that is not ASCII cannot be compared in constant time.
        given = str(message.get("proof", "")).encode(errors="replace")
        if message.get("t") != kind or not hmac.compare_digest(wanted.encode(), given):
            raise AuthenticationError("peer does not know the run secret")


def connect(
    address: tuple[str, int],
    secret: bytes,
    realm: str,
    timeout_seconds: float,
    tls: Tls | None = None,
) -> socket.socket:
    """Open an authenticated TCP connection; the timeout stays set on the socket.

    Raises OSError when nobody listens or TLS fails, and AuthenticationError for a stranger.
    """
    connection = socket.create_connection(address, timeout=timeout_seconds)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            connection = tls.wrap(connection, accepted=False)
            connection.do_handshake()
        handshake = Handshake(secret, realm)
        framing.send(connection, handshake.hello())
        framing.send(connection, handshake.answer(framing.receive(connection, _HANDSHAKE_BYTES)))
    except BaseException:
        connection.close()
        raise
    return connection


def accept(connection: socket.socket, secret: bytes, realm: str) -> None:
    """Authenticate a connection just accepted; the caller has set its timeout."""
    handshake = Handshake(secret, realm)
    framing.send(connection, handshake.challenge(framing.receive(connection, _HANDSHAKE_BYTES)))
    handshake.verify(framing.receive(connection, _HANDSHAKE_BYTES))


async def connect_stream(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, realm: str
) -> None:
    """Asyncio form of the connecting side; the caller bounds the time."""
    handshake = Handshake(secret, realm)
    writer.write(framing.encode(handshake.hello()))
    challenge = await framing.read_frame(reader, _HANDSHAKE_BYTES)
    writer.write(framing.encode(handshake.answer(challenge)))
    await writer.drain()


async def accept_stream(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, realm: str
) -> None:
    """Asyncio form of the accepting side; the caller bounds the time.

    Raises ConnectionClosed itself, no subclass, for somebody who left without a word.
    """
    handshake = Handshake(secret, realm)
    hello = await framing.read_frame(reader, _HANDSHAKE_BYTES)
    writer.write(framing.encode(handshake.challenge(hello)))
    await writer.drain()
    try:
        answer = await framing.read_frame(reader, _HANDSHAKE_BYTES)
    except ConnectionClosed as error:
        raise AuthenticationError("peer left without an answer") from error
    handshake.verify(answer)
