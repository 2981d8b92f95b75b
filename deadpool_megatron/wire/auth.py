"""Mutual challenge-response with the run secret, before any other message of a TCP connection.

Each side proves that it knows the secret without sending it: HMAC-SHA256 over a direction label,
the realm (the run and the service), the address that was dialled, and the nonces of both sides. So
an answer is useless when it was recorded, reflected to its sender, or obtained from another service
or address. The run secret is made by the launcher (file ``secret`` in the run directory, mode 0600)
or given in ``DEADPOOL_SECRET``.

All later messages are records with keys from the same secret and nonces
(:mod:`~deadpool_megatron.wire.sealed_records`), which are not encrypted. Each side also states
whether it can compute a MAC of bulk bytes. Both statements enter the proofs, so a man in the middle
cannot take the MAC away.
"""

from __future__ import annotations

import hmac
import importlib.util
import ipaddress
import os
import re
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deadpool_megatron import UserError, ownership
from deadpool_megatron.file_systems import write_once
from deadpool_megatron.wire import framing, sealed_records as records
from deadpool_megatron.wire.framing import ConnectionClosed, OtherVersion, WireError

ENVIRONMENT_NAME = "DEADPOOL_SECRET"
# The largest frame of a handshake.
_MAX_FRAME_BYTES = 4096
# The answer to a frame of another version: the peer learns the reason because it cannot read it.
_OTHER_VERSION = {"t": "other-version"}
_NONCE = re.compile(r"[0-9a-f]{32}")
_MIN_SECRET_BYTES = 16
_MAX_ADDRESS_CHARACTERS = 80
# Whether this host can compute the MAC of bulk bytes.
CAN_GMAC = importlib.util.find_spec("cryptography") is not None
# Set to 1 on nodes whose addresses look different to others (NAT, services of a cluster).
NAT_VARIABLE = "DEADPOOL_TRANSLATED_ADDRESSES"


class AuthenticationError(UserError, WireError):
    """The peer does not know the run secret, or belongs to another run."""


def load_secret(run_directory: Path) -> bytes:
    """Return the run secret from the environment or the run directory.

    Raises AuthenticationError when it is missing or so short that it could be guessed, or when
    other users can read or replace its file. White space around it does not count.
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


def create_secret(run_directory: Path, secret: bytes = b"") -> None:
    """Write the secret, or a new secret, atomically with mode 0600, unless the file exists.

    Nothing is written where the environment has the run's secret.
    """
    if not os.environ.get(ENVIRONMENT_NAME):
        secret = secret or secrets.token_hex(32).encode()
        write_once(run_directory / "secret", secret, 0o600)


def _checked(secret: bytes, place: str) -> bytes:
    if len(secret) < _MIN_SECRET_BYTES:
        raise AuthenticationError(
            f"the run secret in {place} has less than {_MIN_SECRET_BYTES} characters: make one"
            " with 'openssl rand -hex 32'"
        )
    return secret


def _nonce_of(message: dict[str, Any]) -> str:
    """Return the peer's nonce; anything but 16 bytes in hexadecimal is refused."""
    nonce = message.get("nonce")
    if not isinstance(nonce, str) or not _NONCE.fullmatch(nonce):
        raise AuthenticationError("peer sent no proper nonce")
    return nonce


def address_of(name: Any) -> str:
    """Return the normalized ``ADDRESS:PORT`` of a socket name; empty without an address."""
    if not isinstance(name, tuple):
        return ""
    address = ipaddress.ip_address(str(name[0]).partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return f"{mapped or address}:{name[1]}"


def leaves_host(address: str) -> bool:
    """Return whether bytes for an address (``ADDRESS:PORT``; or empty) leave the host."""
    host = address.rpartition(":")[0]
    return bool(host) and not ipaddress.ip_address(host).is_loopback


class Handshake:
    """The three messages as pure data, shared by the blocking and the asyncio form.

    ``address`` is that of the accepting side: the connecting side gives the address that it
    dialled, the accepting side its own. So a proof is useless to a man in the middle.
    """

    def __init__(self, secret: bytes, realm: str, address: str) -> None:
        self._secret = secret
        self._realm = realm
        self._address = address
        self._nonce = secrets.token_hex(16)
        self._peer_nonce = ""
        self._nonces = ""  # first that of the connecting side
        self._has_gmac = CAN_GMAC and leaves_host(address)
        self._offers = (False, False)  # to compute a MAC, in the same order

    def hello(self) -> dict[str, Any]:
        """Return the first message, of the connecting side."""
        about = {"nonce": self._nonce, "gmac": self._has_gmac}
        return {"t": "hello", "run": self._realm, "to": self._address, **about}

    def challenge(self, hello: dict[str, Any]) -> dict[str, Any]:
        """Return the second message, of the accepting side: its nonce and its proof."""
        if hello.get("t") != "hello" or hello.get("run") != self._realm:
            raise AuthenticationError("peer belongs to another run")
        self._peer_nonce = _nonce_of(hello)
        dialled = str(hello.get("to", ""))[:_MAX_ADDRESS_CHARACTERS]
        if dialled != self._address:
            if os.environ.get(NAT_VARIABLE) != "1":
                raise AuthenticationError(
                    f"peer wanted {dialled!r}, this is {self._address}: it is relayed, or"
                    f" addresses are translated between the nodes (then set {NAT_VARIABLE}=1)"
                )
            self._address = dialled
        self._nonces = f"{self._peer_nonce}|{self._nonce}"
        self._offers = (bool(hello.get("gmac")), self._has_gmac)
        about = {"nonce": self._nonce, "gmac": self._has_gmac}
        return {"t": "challenge", "proof": self._proof("accept"), **about}

    def answer(self, challenge: dict[str, Any]) -> dict[str, Any]:
        """Return the third message, of the connecting side, which has checked the peer's proof."""
        self._peer_nonce = _nonce_of(challenge)
        self._nonces = f"{self._nonce}|{self._peer_nonce}"
        self._offers = (self._has_gmac, bool(challenge.get("gmac")))
        self._check(challenge, "challenge", "accept")
        return {"t": "answer", "proof": self._proof("connect")}

    def verify(self, answer: dict[str, Any]) -> None:
        """Check the third message, on the accepting side."""
        self._check(answer, "answer", "connect")

    def direction(self, label: str) -> records.Direction:
        """Return the direction in which the side with this label ("connect" or "accept") sends."""
        key = self._digest(f"records of {label}")
        return records.Direction(key, has_gmac=all(self._offers))

    def _digest(self, label: str) -> bytes:
        text = f"{label}|{self._realm}|{self._address}|{self._nonces}|{self._offers}"
        return hmac.digest(self._secret, text.encode(errors="replace"), "sha256")

    def _proof(self, label: str) -> str:
        return self._digest(label).hex()

    def _check(self, message: dict[str, Any], kind: str, label: str) -> None:
        # As bytes: text that is not ASCII cannot be compared in constant time.
        given = str(message.get("proof", "")).encode(errors="replace")
        wanted = self._proof(label).encode()
        if message.get("t") != kind or not hmac.compare_digest(wanted, given):
            raise AuthenticationError("peer does not know the run secret")


def connect(
    address: tuple[str, int],
    secret: bytes,
    realm: str,
    timeout_seconds: float,
    origin: tuple[str, int] | None = None,
) -> records.RecordSocket:
    """Open an authenticated TCP connection, from ``origin`` if given; the timeout stays set on the
    socket.

    Raises OSError without a listener, and AuthenticationError for a peer of another run.
    """
    opened = socket.create_connection(address, timeout_seconds, origin)
    connection = records.RecordSocket.of(opened)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        handshake = Handshake(secret, realm, address_of(connection.getpeername()))
        framing.send(connection, handshake.hello())
        framing.send(connection, handshake.answer(framing.receive(connection, _MAX_FRAME_BYTES)))
        connection.begin(handshake.direction("connect"), handshake.direction("accept"))
    except BaseException:
        connection.close()
        raise
    return connection


def accept(connection: records.RecordSocket, secret: bytes, realm: str) -> None:
    """Authenticate an accepted connection, which then uses records; the caller sets a timeout."""
    handshake = Handshake(secret, realm, address_of(connection.getsockname()))
    try:
        hello = framing.receive(connection, _MAX_FRAME_BYTES)
    except OtherVersion:
        framing.send(connection, _OTHER_VERSION)
        connection.recv(_MAX_FRAME_BYTES)  # closing with unread bytes would discard our answer
        raise
    framing.send(connection, handshake.challenge(hello))
    handshake.verify(framing.receive(connection, _MAX_FRAME_BYTES))
    connection.begin(handshake.direction("accept"), handshake.direction("connect"))


async def connect_stream(
    reader: records.RecordReader, writer: records.RecordWriter, secret: bytes, realm: str
) -> None:
    """Authenticate as the connecting side, with asyncio; the caller limits the time."""
    handshake = Handshake(secret, realm, address_of(writer.get_extra_info("peername")))
    writer.write(framing.encode(handshake.hello()))
    challenge = await framing.read_frame(reader, _MAX_FRAME_BYTES)
    writer.write(framing.encode(handshake.answer(challenge)))
    reader.begin(handshake.direction("accept"))
    writer.begin(handshake.direction("connect"))
    await writer.drain()


async def accept_stream(
    reader: records.RecordReader,
    writer: records.RecordWriter,
    secret: bytes,
    realm: str,
    on_hello: Callable[[], None] = lambda: None,
) -> None:
    """Authenticate as the accepting side, with asyncio; the caller limits the time. ``on_hello()``
    is called after the first message of the handshake.

    Raises ConnectionClosed itself, no subclass, for a peer that left without a message.
    """
    handshake = Handshake(secret, realm, address_of(writer.get_extra_info("sockname")))
    try:
        hello = await framing.read_frame(reader, _MAX_FRAME_BYTES)
    except OtherVersion:
        writer.write(framing.encode(_OTHER_VERSION))
        raise
    writer.write(framing.encode(handshake.challenge(hello)))
    on_hello()
    await writer.drain()
    try:
        answer = await framing.read_frame(reader, _MAX_FRAME_BYTES)
    except ConnectionClosed as error:
        raise AuthenticationError("peer left without an answer") from error
    handshake.verify(answer)
    reader.begin(handshake.direction("connect"))
    writer.begin(handshake.direction("accept"))
