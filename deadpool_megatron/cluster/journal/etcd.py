"""The journal in etcd, for clusters whose shared file system may be the thing that fails.

Keys, below ``PREFIX/RUN``: ``KIND/NUMBER`` is an entry's *head*, made only if it was absent, so
that of two writers one wins. etcd takes no request above 1.5 MB: an entry is compressed, and one
that is still large is cut into *chunks* ``chunk/TOKEN/INDEX``, which are written before the head
that names their number and the digest of the whole. A writer killed before its head leaves chunks
that nobody reads.

A request whose answer was lost may have been carried out. It is repeated; the head found then
carries its writer's token, drawn for each write, or the digest of the very entry, where an earlier
write of ours had failed and was carried out all the same. Both tell our own success from another's.

The client speaks v3's JSON gateway over the standard library's HTTP, only what a journal needs.
Those on the package index failed the journal's tests: aetcd 1.0.0 has no TLS, and threads, which
a launcher that forks must not have; etcd3gw 2.7.0 has one endpoint and no log-in, takes any answer
to a put for success, and an answer in drops for an answer in time.
Credentials come from the environment variables that ``etcdctl`` reads: ``ETCDCTL_CACERT``,
``ETCDCTL_CERT``, ``ETCDCTL_KEY``, ``ETCDCTL_USER`` (``NAME:PASSWORD`` or a name) and
``ETCDCTL_PASSWORD``.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import json
import os
import re
import secrets
import ssl
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from deadpool_megatron.cluster.journal.journal import (
    DamagedEntry,
    Journal,
    JournalError,
    LostRace,
    digits,
)
from deadpool_megatron.wire import framing

CHUNK_BYTES = 1 << 20
_BEAT_SECONDS = 2.0
_NUMBER = re.compile(r"\d{8}")
_REQUEST_SECONDS = 2.0
_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 0.5
_MOST_ANSWER_BYTES = 64 << 20
_UNAUTHENTICATED = 401
# Besides 5xx: request time-out, too many requests, client closed request (gRPC "cancelled").
_PASSING = (408, 429, 499)


def open_etcd(address: str, run_id: str, limit_seconds: float) -> EtcdJournal:
    """Return the journal at an address of a form that Settings has checked. Raises JournalError."""
    scheme, _, rest = address.partition("://")
    hosts, _, prefix = rest.partition("/")
    credentials = credentials_from(os.environ, secure=scheme == "etcds")
    endpoints = [_host_and_port(text) for text in hosts.split(",")]
    client = EtcdClient(endpoints, credentials, limit_seconds)
    return EtcdJournal(client, f"/{prefix.strip('/')}/{run_id}")


def _host_and_port(text: str) -> tuple[str, int]:
    found = urlsplit(f"//{text}")
    assert found.hostname is not None
    assert found.port is not None
    return found.hostname, found.port


class EtcdJournal(Journal):
    """Thread-safe. A call ends within the client's limit; a beat within two seconds."""

    def __init__(self, client: EtcdClient, base: str) -> None:
        """``base``: key below which this run's keys lie, without a slash at its end."""
        self._client = client
        self._base = base

    def write(self, kind: str, number: int, entry: Mapping[str, Any]) -> None:
        """See :class:`Journal`."""
        key, token = self._key(kind, number), secrets.token_hex(16)
        text = framing.dumps_in_parts(entry).encode()
        digest = hashlib.sha256(text).hexdigest()
        body = zlib.compress(text, 1)  # a recovery waits for this
        chunks = [body[at : at + CHUNK_BYTES] for at in range(0, len(body), CHUNK_BYTES)]
        in_head = len(chunks) == 1
        head = {
            "writer": token,
            "bytes": len(text),
            "sha256": digest,
            "chunks": 0 if in_head else len(chunks),
        }
        for index, chunk in enumerate([] if in_head else chunks):
            self._client.put(self._chunk(token, index), chunk)
        line = json.dumps(head).encode() + b"\n"
        found = self._client.put_if_absent(key, line + body if in_head else line)
        known = None if found is None else _head(key, found)[0]
        if known is None or known.get("writer") == token:
            return
        if not in_head:
            with contextlib.suppress(EtcdError):  # they are in nobody's way
                self._client.delete(self._chunk_prefix(token))
        if known.get("sha256") != digest:
            raise LostRace(f"{key} was written by another coordinator")

    def beat(self, text: str) -> None:
        """See :class:`Journal`."""
        self._client.put(f"{self._base}/beat", text.encode(), _BEAT_SECONDS)

    def last_beat(self) -> str:
        """See :class:`Journal`."""
        found = self._client.get(f"{self._base}/beat", _BEAT_SECONDS)
        return "" if found is None else found.decode(errors="replace")

    def _key(self, kind: str, number: int) -> str:
        return f"{self._base}/{kind}/{digits(number)}"

    def _chunk_prefix(self, token: str) -> str:
        return f"{self._base}/chunk/{token}/"

    def _chunk(self, token: str, index: int) -> str:
        return f"{self._chunk_prefix(token)}{index:05d}"

    def numbers(self, kind: str) -> list[int]:
        """See :class:`Journal`."""
        prefix = f"{self._base}/{kind}/"
        names = [key.removeprefix(prefix) for key in self._client.keys(prefix)]
        for name in names:
            if not _NUMBER.fullmatch(name):
                raise JournalError(f"{prefix}{name} does not belong into a journal")
        return sorted(int(name) for name in names)

    def has(self, kind: str, number: int) -> bool:
        """See :class:`Journal`."""
        return self._client.get(self._key(kind, number)) is not None

    def read(self, kind: str, number: int) -> dict[str, Any]:
        """See :class:`Journal`."""
        key = self._key(kind, number)
        head, body = _head(key, self._get(key))
        try:
            token, count, nbytes = str(head["writer"]), int(head["chunks"]), int(head["bytes"])
            if count:
                body = b"".join(self._get(self._chunk(token, index)) for index in range(count))
            text = zlib.decompressobj().decompress(body, nbytes + 1)
            if hashlib.sha256(text).hexdigest() != head["sha256"]:
                raise ValueError("its digest does not match")
            entry = json.loads(text)
        except (LookupError, TypeError, ValueError, RecursionError, zlib.error) as error:
            raise DamagedEntry(f"{key} is damaged: {error}") from error
        if not isinstance(entry, dict):
            raise DamagedEntry(f"{key} is damaged: not a JSON object")
        return entry

    def _get(self, key: str) -> bytes:
        value = self._client.get(key)
        if value is None:
            raise JournalError(f"{key} is gone from etcd: entries must never be removed")
        return value


def _head(key: str, value: bytes) -> tuple[dict[str, Any], bytes]:
    """The first line of a head, and the bytes behind it."""
    line, _, body = value.partition(b"\n")
    try:
        head = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DamagedEntry(f"{key} is damaged: {error}") from error
    if not isinstance(head, dict):
        raise DamagedEntry(f"{key} is damaged: its head is no JSON object")
    return head, body


class EtcdError(JournalError):
    """No endpoint answered in time, or etcd refused; one line, without any credential."""


@dataclass(frozen=True)
class Credentials:
    """``tls``: None speaks plain HTTP. ``name`` empty: etcd's own users are not used."""

    tls: ssl.SSLContext | None = None
    name: str = ""
    password: str = field(default="", repr=False)


def credentials_from(environment: Mapping[str, str], secure: bool) -> Credentials:
    """Return what the environment gives. Raises EtcdError for files that cannot be loaded."""
    name, _, password = environment.get("ETCDCTL_USER", "").partition(":")
    password = password or environment.get("ETCDCTL_PASSWORD", "")
    if not secure:
        return Credentials(None, name, password)
    authority = environment.get("ETCDCTL_CACERT") or None
    certificate, key = environment.get("ETCDCTL_CERT"), environment.get("ETCDCTL_KEY")
    try:
        tls = ssl.create_default_context(cafile=authority)
        if certificate:
            # With a word at hand nobody is asked for one, which would wait for ever.
            tls.load_cert_chain(certificate, key or None, password="")
    except OSError as error:
        names = ", ".join(str(path) for path in (authority, certificate, key) if path)
        raise EtcdError(
            f"etcd's certificates cannot be loaded ({error.strerror or error}): look at {names}"
        ) from error
    return Credentials(tls, name, password)


class _Unavailable(Exception):
    """This endpoint cannot answer now; another one, or the same one later, may."""


class _TokenExpired(Exception):
    """The token of an earlier log-in is not valid any more."""


class EtcdClient:
    """Thread-safe. ``limit_seconds`` is the default limit of a call."""

    def __init__(
        self,
        endpoints: Sequence[tuple[str, int]],
        credentials: Credentials,
        limit_seconds: float,
    ) -> None:
        self._endpoints = tuple(endpoints)
        self._credentials = credentials
        self._limit_seconds = limit_seconds
        self._preferred = 0
        self._token = ""

    def put_if_absent(self, key: str, value: bytes) -> bytes | None:
        """Make ``key`` in one transaction: None when this was done, else the value that is there.

        When an answer was lost and the request is repeated, that value may be our own.
        """
        name = _text(key.encode())
        answer = self._call(
            f"write {key}",
            "/v3/kv/txn",
            {
                "compare": [
                    {"key": name, "target": "CREATE", "result": "EQUAL", "create_revision": "0"}
                ],
                "success": [{"request_put": {"key": name, "value": _text(value)}}],
                "failure": [{"request_range": {"key": name}}],
            },
        )
        if answer.get("succeeded"):
            return None
        return _value(answer["responses"][0]["response_range"]["kvs"][0])

    def put(self, key: str, value: bytes, limit_seconds: float | None = None) -> None:
        """Set a key."""
        message = {"key": _text(key.encode()), "value": _text(value)}
        self._call(f"write {key}", "/v3/kv/put", message, limit_seconds)

    def get(self, key: str, limit_seconds: float | None = None) -> bytes | None:
        """The value of a key, as a majority of etcd has it; None when it is not there."""
        message = {"key": _text(key.encode())}
        answer = self._call(f"read {key}", "/v3/kv/range", message, limit_seconds)
        found = answer.get("kvs", [])
        return _value(found[0]) if found else None

    def keys(self, prefix: str) -> list[str]:
        """All keys that start with ``prefix``, ascending."""
        start = prefix.encode()
        message = {"key": _text(start), "range_end": _text(_end_of(start)), "keys_only": True}
        answer = self._call(f"read {prefix}", "/v3/kv/range", message)
        return sorted(base64.b64decode(kv["key"]).decode() for kv in answer.get("kvs", []))

    def delete(self, prefix: str) -> None:
        """Remove all keys that start with ``prefix``."""
        start = prefix.encode()
        message = {"key": _text(start), "range_end": _text(_end_of(start))}
        self._call(f"remove {prefix}", "/v3/kv/deleterange", message)

    def _call(
        self, what: str, path: str, message: Mapping[str, Any], limit_seconds: float | None = None
    ) -> dict[str, Any]:
        """Ask until somebody answers. Raises EtcdError, which says ``what`` was to be done."""
        limit = self._limit_seconds if limit_seconds is None else limit_seconds
        deadline = time.monotonic() + limit
        each = min(_REQUEST_SECONDS, limit / len(self._endpoints))
        pause = _FIRST_PAUSE_SECONDS
        causes: dict[int, str] = {}
        while True:
            for turn in range(len(self._endpoints)):
                index = (self._preferred + turn) % len(self._endpoints)
                seconds = min(each, deadline - time.monotonic())
                if seconds <= 0:
                    break
                try:
                    answer = self._ask(self._endpoints[index], path, message, seconds)
                except (OSError, ValueError, http.client.HTTPException, _Unavailable) as error:
                    host, port = self._endpoints[index]
                    causes[index] = f"{host}:{port}: {str(error) or type(error).__name__}"
                    continue
                except EtcdError as error:
                    raise EtcdError(f"cannot {what}: {error}") from None
                self._preferred = index
                return answer
            if time.monotonic() + pause > deadline:
                why = "; ".join(causes.values())
                raise EtcdError(f"cannot {what}: etcd does not answer within {limit:g} s ({why})")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _ask(
        self, endpoint: tuple[str, int], path: str, message: Mapping[str, Any], seconds: float
    ) -> dict[str, Any]:
        """Ask one endpoint, after a log-in where etcd wants one."""
        if not self._credentials.name:
            return self._request(endpoint, path, message, seconds, "")
        for _ in range(2):
            token = self._token or self._log_in(endpoint, seconds)
            try:
                return self._request(endpoint, path, message, seconds, token)
            except _TokenExpired:
                self._token = ""
        raise _Unavailable("a fresh token is not accepted")

    def _log_in(self, endpoint: tuple[str, int], seconds: float) -> str:
        known = {"name": self._credentials.name, "password": self._credentials.password}
        answer = self._request(endpoint, "/v3/auth/authenticate", known, seconds, "")
        self._token = str(answer["token"])
        return self._token

    def _request(
        self,
        endpoint: tuple[str, int],
        path: str,
        message: Mapping[str, Any],
        seconds: float,
        token: str,
    ) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        connection = self._connection(endpoint, seconds)
        try:
            headers = {"Authorization": token} if token else {}
            connection.request("POST", path, json.dumps(message), headers)
            response = connection.getresponse()
            data = bytearray()
            while piece := response.read1(1 << 20):
                data += piece
                if len(data) > _MOST_ANSWER_BYTES:
                    raise _Unavailable(f"answer of more than {_MOST_ANSWER_BYTES} bytes")
                if time.monotonic() > deadline:
                    raise TimeoutError("timed out in the middle of the answer")
        finally:
            connection.close()
        return _judge(response.status, bytes(data), bool(token))

    def _connection(self, endpoint: tuple[str, int], seconds: float) -> http.client.HTTPConnection:
        host, port = endpoint
        tls = self._credentials.tls
        if tls is None:
            return http.client.HTTPConnection(host, port, timeout=seconds)
        return http.client.HTTPSConnection(host, port, timeout=seconds, context=tls)


def _judge(status: int, data: bytes, had_token: bool) -> dict[str, Any]:
    """The answer, or what its failure means."""
    if status == _UNAUTHENTICATED and had_token:
        raise _TokenExpired
    try:
        answer = json.loads(data)
    except ValueError:
        answer = None
    if status >= 500 or status in _PASSING:
        raise _Unavailable(_reason(answer) or f"HTTP status {status}")
    if status != 200:
        raise EtcdError(f"etcd refuses: {_reason(answer) or f'HTTP status {status}'}")
    if not isinstance(answer, dict):
        raise _Unavailable("the answer is not that of etcd's JSON gateway")
    return answer


def _reason(answer: Any) -> str:
    return str(answer.get("error", ""))[:200] if isinstance(answer, dict) else ""


def _end_of(prefix: bytes) -> bytes:
    """The first key behind all that start with ``prefix`` (which ends in a slash here)."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _value(kv: Mapping[str, Any]) -> bytes:
    """The gateway leaves out what is empty."""
    return base64.b64decode(kv.get("value", ""))
