"""What goes into a parity block, at the vaults of those whose state it is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import xxhash

from deadpool_megatron import failpoints
from deadpool_megatron.layout.places.parity import ParityGroup
from deadpool_megatron.layout.records import EpochRecord, Generation, RoleLayout, Source
from deadpool_megatron.vault.core.state import VaultState
from deadpool_megatron.vault.errors import VaultError
from deadpool_megatron.vault.net import fetch
from deadpool_megatron.vault.net.transport import Channel, Transport
from deadpool_megatron.vault.parity.blocks import Arrival, BlockError

# Owners send at paces of their own. Who is ahead waits for as long as the slowest one takes for a
# piece: not so long that he takes the connection for dead.
_MOST_PIECE_BYTES = 1 << 20

# Name -> (bytes, checksum).
Parts = Mapping[str, tuple[int, int]]


class Owners:
    """Connections to the vaults of the roles of a group. One thread, but :meth:`cut`.

    Methods raise BlockError, final when asking again is of no use. After one of :meth:`request` or
    of what came of it bytes are on their way that nobody wants: :meth:`close` puts an end to them.
    """

    def __init__(
        self, state: VaultState, transport: Transport, record: EpochRecord, group: ParityGroup
    ) -> None:
        self._state = state
        self._transport = transport
        self._epoch = record.epoch
        self.piece_bytes = min(state.settings.chunk_bytes, _MOST_PIECE_BYTES)
        self._numbers = {role: number for number, role in enumerate(group.roles)}
        self._sources = {role: Source(record.seats[role].node, role) for role in group.roles}
        self._channels: dict[int, Channel] = {}

    def cut(self) -> None:
        """Break all connections, from any thread."""
        for channel in list(self._channels.values()):
            channel.shutdown()

    def close(self) -> None:
        """End all connections. Only for the thread that uses them: a descriptor must not be used
        again under its feet."""
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            channel.close()

    def connect(self, role: int) -> None:
        """Have a connection, so that what follows does not wait for one."""
        with self._asking(role):
            pass

    def describe(self, role: int, generation: Generation) -> tuple[RoleLayout | None, Parts]:
        """What a role consists of, if its vault knows, and what of a generation is there."""
        with self._asking(role) as channel:
            asked = {"role": role, "generation": generation.to_list()}
            channel.send({"t": "describe", **asked})
            answer = channel.receive()
            held = {str(name): (int(size), int(sum_)) for name, size, sum_ in answer["parts"]}
            layout = RoleLayout.from_dict(answer["layout"]) if answer["layout"] else None
            if (layout and layout.role != role) or any(size < 0 for size, _ in held.values()):
                raise ValueError("described something else")
            return layout, held

    def request(self, role: int, generation: Generation, parts: Parts) -> None:
        """Have parts sent, one after the other, in this order: each when :meth:`arrival` calls for
        it."""
        node, source = self._state.node, self._sources[role]
        with self._asking(role) as channel:
            found = fetch.ask(
                channel, node, self._epoch, source, generation, [*parts], protects=True
            )
            if found != [*parts.values()]:
                raise VaultError("holds other bytes than were announced")

    def arrival(
        self, role: int, generation: Generation, part: str, nbytes: int, expected: int
    ) -> Arrival:
        """The next part of those requested, in pieces of ``piece_bytes``."""
        with self._asking(role) as channel:
            channel.send({"t": "next"})
        return _Share(
            self._state,
            channel,
            self._numbers[role],
            self._sources[role],
            generation,
            part,
            memoryview(bytearray(min(nbytes, self.piece_bytes))),
            nbytes,
            expected,
        )

    def finish(self, role: int) -> None:
        """All that was requested has come, and its owner has counted it."""
        with self._asking(role) as channel:
            if (kind := channel.receive()["t"]) != "end":
                raise ValueError(f"{kind!r} instead of the end")

    @contextlib.contextmanager
    def _asking(self, role: int) -> Iterator[Channel]:
        source = self._sources[role]
        try:
            yield self._channel(source)
        except VaultError as error:
            raise BlockError(self._numbers[role], source, str(error), final=True) from error
        except fetch.UNREACHABLE as error:
            why = f"{type(error).__name__}: {error}"
            raise BlockError(self._numbers[role], source, why) from error

    def _channel(self, source: Source) -> Channel:
        channel = self._channels.get(source.role)
        if channel is None:
            address = self._state.address(source.node)
            if address is None:
                raise ConnectionError("not a live node")
            channel = self._transport.connect(source.node, address.host, address.vault_port)
            self._channels[source.role] = channel
            if not self._state.is_open(self._epoch):
                raise ConnectionError("the epoch was closed while connecting")
            channel.give_way(self._state.settings.dscp)
        return channel


class _Share(Arrival):
    """Read by the thread that makes the block, from the connection to its owner's vault."""

    def __init__(
        self,
        state: VaultState,
        channel: Channel,
        number: int,
        source: Source,
        generation: Generation,
        part: str,
        buffer: memoryview,
        nbytes: int,
        expected: int,
    ) -> None:
        super().__init__(state, number, source, generation, part)
        self._channel = channel
        self._buffer = buffer
        self._left_bytes = nbytes
        self._expected = expected
        self._digest = xxhash.xxh3_64()

    def take(self, count: int) -> memoryview:
        piece = self._buffer[: min(count, self._left_bytes)]
        if not piece:
            return piece
        try:
            self._channel.receive_bulk(piece, self._digest.update)
        except fetch.UNREACHABLE as error:
            raise self._translated(error) from error
        self._left_bytes -= len(piece)
        self._state.reports.counters["bytes combined"] += len(piece)
        role, iteration = self._source.role, self._generation.iteration
        failpoints.hit("vault.combine", role=role, iteration=iteration, part=self._part)
        return piece

    def give_back(self) -> None:
        """The same buffer takes the next piece."""

    def finish(self) -> None:
        self._check(self._digest.intdigest(), self._expected, f"from node {self._source.node}")
