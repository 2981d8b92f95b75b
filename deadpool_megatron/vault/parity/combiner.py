"""What a holder of parity blocks does with contributions; the other side is parity/contributor.py.

One contribution: ``contribute`` with the parts on offer; ``want`` with the size of the pieces and,
for each part that is not yet in the block, where to go on; then for each of these eight bytes with
the digest of what went before, and piece after piece with the digest up to there. ``sealed`` comes
when the block is complete, ``waited`` when that takes too long: then the contributor asks again,
and goes on where it was. Nobody is acknowledged before the block with all contributions is sealed.
Should a block be damaged after that and somebody ask for it once more, the holder has to have all
contributions again, and asks the vaults of those who do not come by themselves (``again``).
"""

from __future__ import annotations

import logging
import struct
import threading
import time
from collections.abc import Mapping
from typing import Any

from deadpool_megatron import failpoints
from deadpool_megatron.layout.places.parity import MEMBERS, Members, ParityGroup
from deadpool_megatron.layout.records import Generation, RoleLayout
from deadpool_megatron.vault.core import room
from deadpool_megatron.vault.core.state import VaultState
from deadpool_megatron.vault.errors import Refusal, Refused, VaultError
from deadpool_megatron.vault.net.transport import Channel, Transport
from deadpool_megatron.vault.parity.assembly import (
    Assembly,
    Damaged,
    GivenUp,
    Stream,
    expected_parts,
)
from deadpool_megatron.vault.shm.segment import checksum
from deadpool_megatron.wire.framing import ConnectionClosed, WireError

log = logging.getLogger(__name__)
DIGEST = struct.Struct("<Q")
# How long a contributor is kept waiting for the others. It blocks nobody but its own next answer.
_WAIT_SECONDS = 1.0
# So long after a block was begun, those who have not come are asked whether they think it is done.
_PATIENCE_SECONDS = 3.0


class Combiner:
    """All parity blocks that are being made on this node. Thread-safe."""

    def __init__(self, state: VaultState, transport: Transport) -> None:
        self._state = state
        self._transport = transport
        self._wait_seconds = min(_WAIT_SECONDS, state.settings.connect_seconds / 4)
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._assemblies: dict[tuple[int, Generation], Assembly] = {}
        self._layouts: dict[int, RoleLayout] = {}

    def drop(self) -> None:
        """The epoch was closed: unfinished blocks are given up."""
        with self._lock:
            dropped, self._assemblies = list(self._assemblies.values()), {}
        for assembly in dropped:
            assembly.give_up()

    def receive(
        self,
        channel: Channel,
        layout: RoleLayout,
        number: int,
        generation: Generation,
        epoch: int,
        parts: Mapping[str, tuple[int, int]],
    ) -> dict[str, Any]:
        """Take a role's contribution to parity role ``number``; answers the last message of the
        dialogue. ``parts``: name -> (nbytes, checksum). Raises Refused; WireError or OSError when
        the connection is of no use any more."""
        try:
            assembly = self._assembly(layout, number, generation, epoch, parts)
            if assembly is not None:
                damaged = self._take(channel, assembly, layout.role, parts)
                if damaged:
                    return {"t": "damaged", "parts": damaged}
                if not self._wait(assembly):
                    raise Refused(Refusal.WAITED)
        except GivenUp as error:
            raise Refused(Refusal.EARLY) from error
        except Refused:
            raise
        except (VaultError, ModuleNotFoundError) as error:
            raise Refused(Refusal.NO_BLOCK_POSSIBLE, str(error)) from error
        if not self._state.is_open(epoch):
            raise Refused(Refusal.STALE)
        return {"t": "sealed", "parts": list(parts)}

    # Which block.

    def _assembly(
        self,
        layout: RoleLayout,
        number: int,
        generation: Generation,
        epoch: int,
        parts: Mapping[str, tuple[int, int]],
    ) -> Assembly | None:
        """The block to add to; None when all of it is sealed already."""
        state = self._state
        with state.changed:
            if layout.role not in self._layouts:
                state.changed.notify_all()
            self._layouts[layout.role] = layout
            group = self._group(layout.role, number, epoch)
        if not self._know_layouts(group, epoch):
            raise Refused(Refusal.EARLY)
        with state.lock:
            if not state.is_open(epoch) or state.ledger is None or state.ledger.parity is None:
                raise Refused(Refusal.STALE)
            expected = expected_parts(state, group, self._layouts)
            block_layout = state.ledger.parity.layout(number, self._layouts)
        if not set(parts) <= expected[layout.role]:
            raise Refused(Refusal.WRONG_BLOCK_PART)
        if self._is_sealed(number, generation, layout.role, parts, expected):
            return None
        # Memory for a slot may take seconds: an epoch can be closed meanwhile.
        with self._making:
            assembly = self._unfinished(number, generation, epoch)
            if assembly is None:
                assembly = self._begin(block_layout, generation, epoch, group, expected)
                with self._lock:
                    self._assemblies[number, generation] = assembly
        if not state.is_open(epoch):
            assembly.give_up()
            raise Refused(Refusal.STALE)
        return assembly

    def _unfinished(self, number: int, generation: Generation, epoch: int) -> Assembly | None:
        """The block as far as it has come in this epoch."""
        with self._lock:
            stale = [one for one in self._assemblies.values() if one.epoch != epoch]
            self._assemblies = {
                key: one
                for key, one in self._assemblies.items()
                if one.epoch == epoch and not one.over
            }
            found = self._assemblies.get((number, generation))
        for assembly in stale:
            assembly.give_up()
        return found

    def _group(self, role: int, number: int, epoch: int) -> ParityGroup:
        """The group of a block that this node is to hold; called under the vault's lock."""
        state = self._state
        if not state.is_open(epoch) or state.ledger is None:
            raise Refused(Refusal.STALE)
        found = state.ledger.parity.block(number) if state.ledger.parity is not None else None
        if found is None or role not in found[0].roles:
            raise Refused(Refusal.WRONG_BLOCK)
        if found[0].holders[found[1]] != state.node:
            raise Refused(Refusal.WRONG_HOLDER)
        return found[0]

    def _know_layouts(self, group: ParityGroup, epoch: int) -> bool:
        """Wait until all layouts of a group are known. Each is offered with a contribution; who
        has nothing to contribute is asked."""
        state = self._state

        def missing() -> list[int]:
            for role in group.roles:
                if role not in self._layouts and (known := state.table.layout(role)) is not None:
                    self._layouts[role] = known
            return [role for role in group.roles if role not in self._layouts]

        with state.changed:
            state.changed.wait_for(
                lambda: not missing() or not state.is_open(epoch), self._wait_seconds
            )
            unknown = missing()
        for role in unknown:
            self._ask(role)
        with state.lock:
            return not missing()

    def _ask(self, role: int) -> None:
        answer = self._tell(role, {"t": "describe", "role": role})
        layout = answer.get("layout")
        if layout is not None:
            with self._state.lock:
                self._layouts.setdefault(role, RoleLayout.from_dict(layout))

    def _tell(self, role: int, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """The answer of the vault on the node of a role; empty when it gives none."""
        record = self._state.record
        seat = record.seats.get(role) if record is not None else None
        address = self._state.address(seat.node) if seat is not None else None
        if address is None:
            return {}
        try:
            channel = self._transport.connect(address.host, address.vault_port)
            try:
                channel.send(message)
                return channel.receive()
            finally:
                channel.close()
        except (OSError, WireError) as error:
            log.info("%s to role %d: %s: %s", message["t"], role, type(error).__name__, error)
            return {}

    def _is_sealed(
        self,
        number: int,
        generation: Generation,
        role: int,
        parts: Mapping[str, tuple[int, int]],
        expected: Mapping[int, frozenset[str]],
    ) -> bool:
        """True when a sealed block holds what is offered, and what it has to hold of all others."""
        state = self._state
        with state.lock:
            places = state.table.find(number, generation, MEMBERS)
            sealed = state.table.parts(number, generation)
        if not places:
            return False
        found = checksum(places[0].view)
        if found != places[0].checksum:
            state.mark_bad(places[0], found)
            return False
        contributions = Members.decode(places[0].view).contributions
        for other, names in expected.items():
            if not names <= sealed or not names <= set(contributions.get(other, {})):
                return False
        if any(contributions[role][name] != pair for name, pair in parts.items()):
            raise Refused(Refusal.OTHER_BYTES)
        return True

    def _begin(
        self,
        layout: RoleLayout,
        generation: Generation,
        epoch: int,
        group: ParityGroup,
        expected: Mapping[int, frozenset[str]],
    ) -> Assembly:
        state = self._state
        with state.lock:
            held = [slot.generation for slot in state.table.sealed(layout.role) if slot.parts]
        if any(newer > generation for newer in held):
            # Roles contribute in order: who asks for this one has only forgotten that it is done.
            # A slot for it there may be none until he contributes to the newest one.
            raise Refused(Refusal.SUPERSEDED)
        if room.own_come_first(state):
            raise Refused(Refusal.EARLY)
        segment = room.ensure_copy(state, layout, generation)
        # Of the generation that the epoch began with there may be a block that others rely on,
        # though parts are missing which peers held before: it stays until the new one is sealed.
        anew = state.record is not None and generation == state.record.restore.generation
        slot = state.claim(segment, generation, epoch, anew=anew)
        if slot is None:
            raise Refused(Refusal.EARLY)
        names = [MEMBERS, *sorted({name for parts in expected.values() for name in parts})]
        try:
            room.reserve(state, segment, names, slot, generation)
            for name in names:
                if not state.open_part(segment, slot, name, epoch):
                    raise Refused(Refusal.STALE)
            return Assembly(state, segment, slot, generation, epoch, group, expected)
        except BaseException:
            state.release(segment, slot)
            raise

    # The bytes.

    def _take(
        self,
        channel: Channel,
        assembly: Assembly,
        role: int,
        parts: Mapping[str, tuple[int, int]],
    ) -> list[str]:
        """Receive what is missing of a contribution; answers parts that were other bytes than
        their owner had announced."""
        size = self._state.settings.chunk_bytes
        owner = object()
        streams = [stream for stream in assembly.open(role, parts, owner) if not stream.done]
        wanted = [[stream.name, stream.offset] for stream in streams]
        channel.send({"t": "want", "chunk_bytes": size, "parts": wanted})
        buffer = bytearray(min(size, max((s.nbytes for s in streams), default=0)))
        damaged = []
        for stream in streams:
            if _receive_digest(channel) != stream.digest:
                assembly.give_up()  # the owner has other bytes than it had before
                raise ConnectionClosed("a contribution has changed")
            while stream.offset < stream.nbytes:
                self._take_piece(channel, assembly, stream, owner, buffer)
            if not stream.done:
                damaged.append(stream.name)
                self._report(assembly, stream, "contribution", stream.expected, stream.digest)
        if damaged:
            assembly.give_up()
        return damaged

    def _take_piece(
        self,
        channel: Channel,
        assembly: Assembly,
        stream: Stream,
        owner: object,
        buffer: bytearray,
    ) -> None:
        count = min(len(buffer), stream.nbytes - stream.offset)
        piece = buffer if count == len(buffer) else memoryview(buffer)[:count]
        channel.receive_bulk(memoryview(piece))
        announced = _receive_digest(channel)
        try:
            assembly.combine(stream, owner, piece, announced)
        except Damaged as error:
            # Nothing of it was combined: a new connection brings it again.
            self._report(assembly, stream, "wire", error.expected, error.found)
            raise ConnectionClosed("damaged on the wire") from error
        except GivenUp as error:  # in the middle of a stream there is no place for an answer
            raise ConnectionClosed("the parity block was given up") from error
        self._state.counters["bytes combined"] += count
        failpoints.hit(
            "vault.combine",
            role=stream.role,
            iteration=assembly.generation.iteration,
            part=stream.name,
        )

    def _report(
        self, assembly: Assembly, stream: Stream, where: str, expected: int, found: int
    ) -> None:
        self._state.counters["corruption"] += 1
        self._state.emit_corruption(
            stream.role, assembly.generation, stream.name, where, expected, found
        )

    def _wait(self, assembly: Assembly) -> bool:
        """True when the block is sealed in time. Raises GivenUp when it never will be."""
        assembly.finish()
        state = self._state
        with state.changed:
            state.changed.wait_for(
                lambda: assembly.over or not state.is_open(assembly.epoch), self._wait_seconds
            )
        if assembly.given_up and not assembly.sealed:
            raise GivenUp
        if not assembly.sealed and time.monotonic() - assembly.begun > _PATIENCE_SECONDS:
            for role in assembly.absent():
                self._demand(assembly, role)
        return assembly.sealed

    def _demand(self, assembly: Assembly, role: int) -> None:
        """Have a role contribute once more, if it believes that it need not."""
        message = {
            "t": "again",
            "epoch": assembly.epoch,
            "node": self._state.node,
            "role": role,
            "generation": assembly.generation.to_list(),
            "parts": sorted(assembly.expected[role]),
        }
        if self._tell(role, message).get("t") == "again":
            assembly.asked(role)


def _receive_digest(channel: Channel) -> int:
    raw = bytearray(DIGEST.size)
    channel.receive_bulk(memoryview(raw))
    return int(DIGEST.unpack(raw)[0])
