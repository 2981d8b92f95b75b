"""Records on their way from the coordinator to the agents, each agent only what it lacks.

A message ``record`` has the change (see layout.deltas) as text, which is made once for all agents
that have the same record, and the sources of the one node. A long text goes compressed: the first
record of 4,096 nodes is sent to all of them at the same time.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from typing import Any

from deadpool_megatron.layout.deltas import apply, change, sources_by_node
from deadpool_megatron.layout.records import EpochRecord
from deadpool_megatron.wire import large_json
from deadpool_megatron.wire.framing import MAXIMUM_FRAME_BYTES, WireError

_COMPRESSED_FROM_BYTES = 16 << 10


class RecordTeller:
    """One record, told to agents that have the one before, an older one or none.

    Not thread-safe. ``before``: the record that was told last.
    """

    def __init__(self, record: EpochRecord, before: EpochRecord | None) -> None:
        self.record = record
        self._bases = {} if before is None else {before.epoch: before}
        self._changes: dict[int, str] = {}
        self._sources = sources_by_node(record)

    def begin(self) -> None:
        """Make the change that most agents need, before it is needed."""
        self._change(max(self._bases, default=0))

    def parts(self, node: int, known_epoch: int) -> dict[str, Any] | None:
        """What a node lacks that has the record of ``known_epoch`` (0: none); None: nothing."""
        if known_epoch == self.record.epoch:
            return None
        base = known_epoch if known_epoch in self._bases else 0
        return {"change": self._change(base), "sources": self._sources.get(node, {})}

    def _change(self, base: int) -> str:
        if base not in self._changes:
            self._changes[base] = pack(change(self._bases.get(base), self.record))
        return self._changes[base]


class RecordKeeper:
    """An agent's side: the newest record it was told, completed by each change."""

    def __init__(self) -> None:
        self._record: EpochRecord | None = None

    @property
    def epoch(self) -> int:
        """Of the newest record, 0 before the first: what the coordinator must know."""
        return 0 if self._record is None else self._record.epoch

    def take(self, parts: Mapping[str, Any]) -> EpochRecord:
        """The record that the message means. Raises WireError when it cannot be understood; after
        the next connect the agent is told everything it lacks.
        """
        try:
            self._record = apply(self._record, unpack(str(parts["change"])), parts["sources"])
        except (KeyError, TypeError, ValueError, zlib.error) as error:
            self._record = None
            raise WireError(f"a record that cannot be used: {error!r}") from error
        return self._record


def pack(values: Mapping[str, Any]) -> str:
    text = large_json.dumps(values)
    if len(text) < _COMPRESSED_FROM_BYTES:
        return text
    return base64.b64encode(zlib.compress(text.encode(), 6)).decode()


def unpack(text: str) -> dict[str, Any]:
    if not text.startswith("{"):
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(base64.b64decode(text, validate=True), MAXIMUM_FRAME_BYTES)
        if unpacker.unconsumed_tail:
            raise ValueError(f"unpacks to more than {MAXIMUM_FRAME_BYTES} bytes")
        text = data.decode()
    values = json.loads(text)
    if not isinstance(values, dict):
        raise ValueError("a change is a JSON object")
    return values
