"""TLS for the control and vault connections of a run, from certificates the user gives.

Mutual: both sides show a certificate that the run's authority has signed. Host names are not
compared, as agents are reached by numbers that nobody knows before the run; so the authority should
be one made for training, not one that signs for everybody. The handshake with the run secret
(:mod:`~deadpool_megatron.wire.auth`) takes place inside.
"""

from __future__ import annotations

import asyncio
import functools
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path

from deadpool_megatron.settings import Settings, SettingsError, flag_name
from deadpool_megatron.wire.records import RecordReader, RecordWriter


class TlsError(SettingsError):
    """The certificates cannot be used; one line that names the file."""


@dataclass(frozen=True)
class Tls:
    """One context for each side of a connection. Thread-safe."""

    server: ssl.SSLContext
    client: ssl.SSLContext

    def wrap(self, connection: socket.socket, *, accepted: bool) -> ssl.SSLSocket:
        """A blocking socket under TLS; the caller calls ``do_handshake``."""
        context = self.server if accepted else self.client
        return context.wrap_socket(connection, server_side=accepted, do_handshake_on_connect=False)


def contexts(settings: Settings) -> Tls | None:
    """Return what the settings name, or None where they name nothing.

    Raises TlsError for files that cannot be read or do not belong together: certificate and key
    have to fit, and the authority has to vouch for the certificate in both roles, today.
    """
    if not settings.tls_certificate:
        return None
    return _load(settings.tls_certificate, settings.tls_key, settings.tls_authority)


async def open_stream(
    address: tuple[str, int], tls: Tls | None
) -> tuple[RecordReader, RecordWriter]:
    """Connect, with TLS where there is any; the caller bounds the time."""
    loop = asyncio.get_running_loop()
    reader = RecordReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await loop.create_connection(
        lambda: protocol, *address, ssl=tls.client if tls else None
    )
    return reader, RecordWriter(transport, protocol, reader, loop)


async def accepted_stream(
    connection: socket.socket, tls: Tls | None
) -> tuple[RecordReader, RecordWriter]:
    """Streams of a connection just accepted; the caller bounds the time."""
    loop = asyncio.get_running_loop()
    reader = RecordReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await loop.connect_accepted_socket(
        lambda: protocol, connection, ssl=tls.server if tls else None
    )
    return reader, RecordWriter(transport, protocol, reader, loop)


@functools.cache
def _load(certificate: str, key: str, authority: str) -> Tls:
    for field, name in (
        ("tls_certificate", certificate),
        ("tls_key", key),
        ("tls_authority", authority),
    ):
        try:
            Path(name).read_bytes()
        except OSError as error:
            raise TlsError(f"{flag_name(field)} {name} cannot be read: {error.strerror}") from error
    if Path(key).stat().st_mode & 0o077:
        raise TlsError(f"--deadpool-tls-key {key} can be read by others: chmod 600 it")
    server = _context(ssl.PROTOCOL_TLS_SERVER, certificate, key, authority)
    # Nobody resumes a session here, and a ticket would look like the beginning of a message.
    server.num_tickets = 0
    client = _context(ssl.PROTOCOL_TLS_CLIENT, certificate, key, authority)
    _try(server, client, certificate, authority)
    return Tls(server, client)


def _context(protocol: int, certificate: str, key: str, authority: str) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        # A key under a passphrase is refused: nobody is there to type it.
        context.load_cert_chain(certificate, key, password="")
    except ssl.SSLError as error:
        raise TlsError(
            f"--deadpool-tls-certificate {certificate} and --deadpool-tls-key {key} are not a"
            f" certificate and its key without a passphrase, in PEM form ({_reason(error)})"
        ) from error
    try:
        context.load_verify_locations(authority)
    except ssl.SSLError as error:
        raise TlsError(
            f"--deadpool-tls-authority {authority} holds no certificate in PEM form"
            f" ({_reason(error)})"
        ) from error
    return context


def _try(server: ssl.SSLContext, client: ssl.SSLContext, certificate: str, authority: str) -> None:
    """Shake hands with ourselves in memory: whatever would fail later fails now."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        client.wrap_bio(to_client, to_server, server_side=False),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    try:
        for _ in range(3):
            for side in sides:
                try:
                    side.do_handshake()
                except ssl.SSLWantReadError:
                    continue
    except ssl.SSLError as error:
        raise TlsError(
            f"--deadpool-tls-certificate {certificate} is not accepted under"
            f" --deadpool-tls-authority {authority}: {_reason(error)}"
        ) from error


def _reason(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    return (error.reason or str(error)).lower().replace("_", " ")
