"""The journal in etcd, for clusters whose shared file system may be the thing that fails.

Keys, below ``PREFIX/RUN``: ``KIND/NUMBER`` is an entry's *head*, made only if it was absent, so
that of two writers one wins. etcd takes no request above 1.5 MB: an entry is compressed, and one
that is still large is cut into *chunks* ``chunk/TOKEN/INDEX``, which are written before the head
that names their number and the digest of the whole. A writer killed before its head leaves chunks
that nobody reads.

A request whose answer was lost may have been carried out. It is repeated; the head found then
carries its writer's token, drawn for each write, or the digest of the very entry, where an earlier
write of ours had failed and was carried out all the same. Both tell our own success from another's.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import secrets
import zlib
from collections.abc import Mapping
from typing import Any

from deadpool_megatron.cluster.journal.entries import (
    DamagedEntry,
    Journal,
    JournalError,
    LostRace,
    digits,
)
from deadpool_megatron.cluster.journal.etcd_client import EtcdClient, EtcdError
from deadpool_megatron.wire import framing

CHUNK_BYTES = 1 << 20
_BEAT_SECONDS = 2.0
_NUMBER = re.compile(r"\d{8}")


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
        try:
            if not in_head:
                for index, chunk in enumerate(chunks):
                    self._client.put(self._chunk(token, index), chunk)
            line = json.dumps(head).encode() + b"\n"
            found = self._client.put_if_absent(key, line + body if in_head else line)
        except EtcdError as error:
            raise JournalError(f"cannot write {key}: {error}") from error
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
        try:
            self._client.put(f"{self._base}/beat", text.encode(), _BEAT_SECONDS)
        except EtcdError as error:
            raise JournalError(f"cannot write {self._base}/beat: {error}") from error

    def last_beat(self) -> str:
        """See :class:`Journal`."""
        try:
            found = self._client.get(f"{self._base}/beat", _BEAT_SECONDS)
        except EtcdError as error:
            raise JournalError(f"cannot read {self._base}/beat: {error}") from error
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
        try:
            names = [key.removeprefix(prefix) for key in self._client.keys(prefix)]
        except EtcdError as error:
            raise JournalError(f"cannot read {prefix}: {error}") from error
        for name in names:
            if not _NUMBER.fullmatch(name):
                raise JournalError(f"{prefix}{name} does not belong into a journal")
        return sorted(int(name) for name in names)

    def has(self, kind: str, number: int) -> bool:
        """See :class:`Journal`."""
        key = self._key(kind, number)
        try:
            return self._client.get(key) is not None
        except EtcdError as error:
            raise JournalError(f"cannot read {key}: {error}") from error

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
        try:
            value = self._client.get(key)
        except EtcdError as error:
            raise JournalError(f"cannot read {key}: {error}") from error
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
