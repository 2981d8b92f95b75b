"""Making the parity blocks that this node holds, each by a thread that fetches what goes into it.

Encoding is decoding (:mod:`.parity_decode`): of k + m blocks any k give every other one; here the k
are the owners' own slots, and the wanted one is ours. An owner's vault announces a sealed
generation (:mod:`.parity`). Once all k have, their parts are fetched, in step and in pieces, and
combined straight into the slot. An owner's slot stays as it is meanwhile: its member does not pass
the gate before the block is sealed. Nobody is acknowledged before that.

Whatever fails, the block is begun again from nothing, with what it can still be made of. Owners who
do not announce, as they take the block for sealed or have nothing to put into it, are asked.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

import xxhash

from deadpool_megatron import failpoints
from deadpool_megatron.layout.parity_groups import MEMBERS, Members, ParityGroup
from deadpool_megatron.layout.records import EpochRecord, Generation, RoleLayout, Source
from deadpool_megatron.vault.core import fetch, room
from deadpool_megatron.vault.core.state import VaultState
from deadpool_megatron.vault.errors import Refusal, Refused, VaultError
from deadpool_megatron.vault.net.transport import Channel, Transport
from deadpool_megatron.vault.schemes.base import Parts
from deadpool_megatron.vault.schemes.parity_blocks import Arrival, BlockError
from deadpool_megatron.vault.schemes.parity_decode import combine
from deadpool_megatron.vault.shm.segment import Segment, checksum

if TYPE_CHECKING:
    from deadpool_megatron.vault.schemes.parity import Parity
    from deadpool_megatron.vault.schemes.parity_code import Coder

log = logging.getLogger(__name__)
# How long an announcement is kept waiting, which blocks nobody but its own next one, and how long
# those who have not announced are waited for before they are asked.
_WAIT_SECONDS = 1.0
_FIRST_PAUSE_SECONDS = 0.02
_LONGEST_PAUSE_SECONDS = 0.5
# Owners send at paces of their own. Who is ahead waits for as long as the slowest one takes for a
# piece: not so long that he takes the connection for dead.
_MOST_PIECE_BYTES = 1 << 20


class _NotYet(Exception):
    """There is no slot for it, or the epoch is over."""


class BlockMaker(threading.Thread):
    """Makes one parity block, generation after generation, until the epoch is closed.

    :meth:`announced` and :meth:`cut` may be called from any thread.
    """

    def __init__(
        self,
        state: VaultState,
        transport: Transport,
        scheme: Parity,
        number: int,
    ) -> None:
        super().__init__(name=f"block-{number}", daemon=True)
        found = scheme.placement.block(number)
        assert found is not None, "the number of a block of this plan"
        record = scheme.record
        self._state = state
        self._epoch = record.epoch
        self._restored = record.restore.generation
        self._scheme = scheme
        self._number = number
        self._group, self._index = found
        self._owners = Owners(state, transport, record, self._group)
        self._over = False
        self._wait_seconds = min(_WAIT_SECONDS, state.settings.connect_seconds / 4)
        # Guarded by the vault's lock, as everything below.
        self._layouts: dict[int, RoleLayout] = {}
        self._expected: dict[int, frozenset[str]] = {}  # role -> parts that go into the block
        self._offers: dict[Generation, dict[int, dict[str, tuple[int, int]]]] = {}
        self._sealed_count = 0
        for role in self._group.roles:
            if (known := state.table.layout(role)) is not None:
                self._learn(known)

    def cut(self) -> None:
        """Break all connections and end: the epoch is over."""
        self._over = True
        self._owners.cut()

    def _going(self) -> bool:
        return not self._over and self._state.is_open(self._epoch)

    # For the threads that serve owners.

    def announced(self, layout: RoleLayout, generation: Generation, parts: Parts) -> None:
        """A role has sealed these parts; returns when the block that they are in is sealed, too.

        Raises Refused, with WAITED when that takes too long.
        """
        state, role = self._state, layout.role
        with state.changed:
            self._learn(layout)
            state.changed.notify_all()
        if not set(parts) <= self._expected[role]:
            raise Refused(Refusal.WRONG_BLOCK_PART)
        while True:
            count = self._sealed_count
            sealed = self._sealed(generation)
            if not self._going():
                raise Refused(Refusal.STALE)
            if sealed is not None:
                if any(sealed[role][name] != part for name, part in parts.items()):
                    raise Refused(Refusal.OTHER_BYTES)
                return
            with state.changed:
                if self._sealed_count != count:
                    continue
                if self._is_superseded(generation):
                    raise Refused(Refusal.SUPERSEDED)
                self._offer(role, generation, parts)
                state.changed.notify_all()
                if not state.changed.wait_for(partial(self._has_news, count), self._wait_seconds):
                    raise Refused(Refusal.WAITED)

    def _has_news(self, count: int) -> bool:
        return self._sealed_count != count or not self._going()

    def _learn(self, layout: RoleLayout) -> None:
        self._layouts[layout.role] = layout
        self._expected[layout.role] = frozenset(self._scheme.coded(layout))

    def _offer(self, role: int, generation: Generation, parts: Parts) -> None:
        self._offers.setdefault(generation, {}).setdefault(role, {}).update(parts)

    def _is_superseded(self, generation: Generation) -> bool:
        """Owners announce in order: who comes with an old one has only forgotten that it is done.
        A slot for it there may be none until he comes with the newest one."""
        sealed = self._state.table.sealed(self._number)
        return any(slot.generation > generation for slot in sealed if slot.parts)

    def _sealed(self, generation: Generation) -> Mapping[int, Parts] | None:
        """Return what the sealed block is made of, if it has all that it has to have."""
        state = self._state
        with state.lock:
            places = state.table.find(self._number, generation, MEMBERS)
            sealed = state.table.parts(self._number, generation)
            expected = dict(self._expected)
        if not places or len(expected) < len(self._group.roles):
            return None
        members = memoryview(bytes(places[0].view))  # a newer block may take the slot meanwhile
        found = checksum(members)
        if found != places[0].checksum:
            state.mark_bad(places[0], found)
            return None
        contributions = Members.decode(members).contributions
        whole = all(
            names <= sealed and names <= set(contributions.get(role, ()))
            for role, names in expected.items()
        )
        return contributions if whole else None

    # The thread that makes them.

    def run(self) -> None:
        """Until the epoch is closed."""
        pause = _FIRST_PAUSE_SECONDS
        while self._going():
            generation = self._next()
            if generation is None:
                continue
            if self._made(generation):
                pause = _FIRST_PAUSE_SECONDS
                continue
            with self._state.changed:
                self._state.changed.wait_for(lambda: not self._going(), timeout=pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        self._owners.close()

    def _next(self) -> Generation | None:
        """The oldest generation of which all is known that goes into its block; None, after a wait
        for news, when there is none."""
        state = self._state
        with state.changed:
            state.changed.wait_for(
                lambda: self._complete() is not None or not self._going(), self._wait_seconds
            )
            found = self._complete()
            oldest = min(self._offers, default=None)
        if found is None and oldest is not None and self._going():
            self._ask_absent(oldest)
        return found

    def _complete(self) -> Generation | None:
        return next((g for g in sorted(self._offers) if not self._absent(g)), None)

    def _absent(self, generation: Generation) -> list[int]:
        """Roles of which it is not known yet what they contribute."""
        offers = self._offers.get(generation, {})
        return [
            role
            for role in self._group.roles
            if role not in self._expected or not self._expected[role] <= set(offers.get(role, ()))
        ]

    def _ask_absent(self, generation: Generation) -> None:
        with self._state.lock:
            absent = self._absent(generation)
        for role in absent:
            try:
                layout, held = self._owners.describe(role, generation)
            except BlockError as error:
                log.info("%s: role %d: %s", self.name, role, error)
                self._owners.close()
                continue
            with self._state.lock:
                if layout is not None and generation in self._offers:
                    self._learn(layout)
                    wanted = self._expected[role]
                    self._offer(role, generation, {n: held[n] for n in held if n in wanted})

    def _made(self, generation: Generation) -> bool:
        """Make the block of a generation; False to try again after a pause."""
        state = self._state
        try:
            # All may have announced it because all have forgotten that it is sealed.
            if self._sealed(generation) is None:
                self._make(generation)
        except BlockError as error:
            role = self._group.roles[error.number]
            log.info("%s: %s of role %d: %s", self.name, generation, role, error)
            self._owners.close()  # there are bytes on their way, from others as well
            if error.final:
                with state.lock:
                    self._offers.get(generation, {}).pop(role, None)
            return False
        except _NotYet:
            return False
        except (OSError, VaultError, ModuleNotFoundError) as error:
            state.reports.refuse(f"{Refusal.NO_BLOCK_POSSIBLE}: {error}", role=self._number)
            return False
        with state.changed:
            self._sealed_count += 1
            self._offers = {g: one for g, one in self._offers.items() if g > generation}
            state.changed.notify_all()
        return True

    def _make(self, generation: Generation) -> None:
        # Not at the top: most vaults keep no parity and can do without numpy and its threads.
        from deadpool_megatron.vault.schemes.parity_code import Coder

        state = self._state
        coder = Coder(len(self._group.roles), self._scheme.placement.parities)
        if room.own_come_first(state):
            raise _NotYet
        with state.lock:
            if self._absent(generation):  # with another layout than before
                raise _NotYet
            layout = self._scheme.placement.layout(self._number, self._layouts)
            offers = self._offers[generation]
            shares = {
                role: {name: offers[role][name] for name in sorted(self._expected[role])}
                for role in self._group.roles
                if self._expected[role]
            }
        for role in shares:  # before a slot is taken: a dead node keeps us waiting
            self._owners.connect(role)
        segment = room.ensure_copy(state, layout, generation)
        # Of the generation that the epoch began with there may be a block that others rely on,
        # though parts are missing which peers held before: it stays until the new one is sealed.
        anew = generation == self._restored
        slot = state.claim(segment, generation, self._epoch, anew=anew)
        if slot is None:
            raise _NotYet
        try:
            names = sorted({name for parts in shares.values() for name in parts})
            room.reserve(state, segment, [MEMBERS, *names], slot, generation)
            for name in (MEMBERS, *names):
                if not state.open_part(segment, slot, name, self._epoch):
                    raise _NotYet
            self._fill(coder, segment, slot, shares, names)
        finally:
            state.release(segment, slot)

    def _fill(
        self,
        coder: Coder,
        segment: Segment,
        slot: int,
        shares: Mapping[int, Parts],
        names: list[str],
    ) -> None:
        """Fetch the shares, combine them, and seal the block."""
        generation, size = segment.generation(slot), self._owners.piece_bytes
        longest = {
            name: max(parts[name][0] for parts in shares.values() if name in parts)
            for name in names
        }
        if any(nbytes > segment.capacity(name) for name, nbytes in longest.items()):
            raise VaultError("a part does not fit")
        for role, parts in shares.items():
            self._owners.request(role, generation, parts)
        numbers = range(len(self._group.roles))
        wanted = len(numbers) + self._index
        members = Members(
            self._group.roles, self._index, self._scheme.placement.parities, shares
        ).encode()
        segment.data(slot, MEMBERS, len(members))[:] = members
        # First of all, so that a block which counts always says what it is made of.
        sealed = {MEMBERS: (len(members), xxhash.xxh3_64_intdigest(members))}
        for name, nbytes in longest.items():
            blocks = [
                self._owners.arrival(role, generation, name, *parts[name])
                for role, parts in shares.items()
                if name in parts
            ]
            view = segment.data(slot, name, nbytes)
            about = {"role": self._number, "iteration": generation.iteration, "part": name}
            sealed[name] = nbytes, combine(coder, wanted, numbers, blocks, view, size, **about)
        for role in shares:
            self._owners.finish(role)
        self._seal(segment, slot, sealed)

    def _seal(self, segment: Segment, slot: int, parts: Parts) -> None:
        state = self._state

        def seal() -> None:
            for name, (nbytes, digest) in parts.items():
                state.seal_copy(segment, slot, name, nbytes, digest, self._epoch)

        with state.changed:
            if not self._going():
                raise _NotYet
            state.table.replace(segment, slot, seal)
        state.fail_point_corrupt(
            "vault.received", segment, slot, [name for name in parts if name != MEMBERS]
        )


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
        """Return what a role consists of, if its vault knows, and what of a generation is there."""
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
