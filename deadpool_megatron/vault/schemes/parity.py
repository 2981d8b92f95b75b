"""Parity: shard parts as coded blocks over a group of roles, extras as copies (REFT's AEC).

A role's vault sends its sealed shard parts to the holder of each block of its group as it sends
copies to a buddy (replicate.py). The holder adds the bytes to the block as they arrive, in any
order of roles, and answers ``taken``. The owner repeats its offer, now without bytes to send. The
answer is ``sealed`` once all roles of the group have sent their parts of that generation and the
block is sealed; after a time limit it is ``waited``, and the owner repeats the offer again. No
acknowledgement comes earlier, so the parts stay in the slots of their owners, whose members do not
pass the gate.

* A block needs the memory of one slot, as a copy does, and a buffer for each owner that is sending.
* Bytes cannot be removed from a sum. If the bytes of an owner arrive damaged, incomplete or twice,
  the sum of that part is restarted. The next answers ask its owners for their bytes again.
* An unfinished part is ABSENT, so the inventory at a close does not promise it. After :meth:`cut`
  no thread writes into its slot. A block is sealed together with the list of its contributions,
  under the lock that a close takes.
* When the vault of an owner restarts, it offers its parts again; their checksums show that the
  block has them. When a holder restarts, it builds unsealed blocks from nothing. If a sealed block
  turns out to be damaged, the holder asks its owners to send their parts again. A role that has no
  parts in blocks sends no offer, so the holder asks for its layout.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import xxhash

from deadpool_megatron import failpoints
from deadpool_megatron.layout import parity_groups, records
from deadpool_megatron.vault import slot_memory
from deadpool_megatron.vault.copies import Copies, Offer, OwedGroups, Parts, Target
from deadpool_megatron.vault.errors import Refusal, Refused, VaultError
from deadpool_megatron.vault.schemes.parity_decode import load_code
from deadpool_megatron.vault.shm.segment import Segment, checksum
from deadpool_megatron.vault.slot_store import SlotStore
from deadpool_megatron.vault.transport import UNREACHABLE, Channel, begin_thread
from deadpool_megatron.wire.framing import ConnectionClosed

if TYPE_CHECKING:
    from deadpool_megatron.vault.schemes.parity_code import Combination

log = logging.getLogger(__name__)
# The time for which a holder waits for other owners before it asks them, and answers ``waited``.
_WAIT_SECONDS = 1.0
_MAX_PIECE_BYTES = 1 << 20


class Parity(Copies):
    """Blocks of the shard parts of each group, and copies of extras (layout.parity_groups)."""

    def __init__(self, record: records.EpochRecord, store: SlotStore) -> None:
        super().__init__(record)
        self._store = store
        self.placement = parity_groups.ParityPlacement.of_record(record)
        self._blocks: dict[int, ParityBlock] = {}
        begin_thread("load-code", partial(load_code, record.replicas))

    def coded(self, layout: records.RoleLayout) -> list[str]:
        """Return the shard parts that are combined into the blocks of the role's group."""
        return [name for name in self._uncovered(layout) if not records.is_extras(name)]

    def holders(self, role: int) -> list[Target]:
        """Return the holders of the blocks of a role's group."""
        group = self.placement.by_role.get(role)
        places = () if group is None else zip(group.blocks, group.holders, strict=True)
        return [Target(node, block) for block, node in places]

    def _owed_groups(self, layout: records.RoleLayout) -> OwedGroups:
        extras = [name for name in self._uncovered(layout) if records.is_extras(name)]
        return [(self._buddies(layout), extras), (self.holders(layout.role), self.coded(layout))]

    def keeps(self, layout: records.RoleLayout, node: int) -> Collection[str]:
        if not records.is_parity_role(layout.role):
            return super().keeps(layout, node)
        found = self.placement.by_block.get(layout.role)
        if found is None or found[0].holders[found[1]] != node:
            return ()
        return [part.name for part in layout.parts]

    def combine(self, channel: Channel, block: int, offer: Offer) -> None:
        self.block(block, offer.role).put(channel, offer)

    def block(self, number: int, role: int) -> ParityBlock:
        """Return a block that ``role`` is part of. Raises Refused for a block that is not kept here
        in this epoch."""
        gate = self._store.gate
        with gate.lock:
            if not gate.is_open(self.record.epoch):
                raise Refused(Refusal.STALE)
            found = self.placement.by_block.get(number)
            if found is None or role not in found[0].roles:
                raise Refused(Refusal.WRONG_BLOCK)
            if found[0].holders[found[1]] != gate.node:
                raise Refused(Refusal.WRONG_HOLDER)
            block = self._blocks.get(number)
            if block is None:
                block = self._blocks[number] = ParityBlock(self._store, self, number, found)
            return block

    def cut(self) -> None:
        """Abandon unfinished blocks."""
        for block in self._blocks.values():
            block.cut()


class _Sum:
    """A part of a block that is being built. ``given``: role -> bytes and checksum of its
    contribution, None while the contribution arrives."""

    def __init__(self, combination: Combination) -> None:
        self.combination = combination
        self.given: dict[int, tuple[int, int] | None] = {}


class BlockBuild:
    """A generation of a block, in a claimed slot. Guarded by the vault's lock."""

    def __init__(self, combine: Callable[[str], Combination], segment: Segment, slot: int) -> None:
        """``combine(name)`` returns an empty combination that writes into that part."""
        self.segment = segment
        self.slot = slot
        self.sums: dict[str, _Sum] = {}
        self.is_sealed = self.is_being_sealed = False
        self._combine = combine

    def begin(self, name: str) -> _Sum:
        """Start or restart the sum of a part. It contains no bytes of an earlier sum, and threads
        that still add to the earlier sum cannot write any more."""
        self.give_up(name)
        self.sums[name] = _Sum(self._combine(name))
        return self.sums[name]

    def give_up(self, name: str) -> None:
        """End all writes to a part."""
        if name in self.sums:
            self.sums[name].combination.give_up()

    def lacks(self, role: int, names: Iterable[str]) -> list[str]:
        """Return the parts that a role has not contributed."""
        return [n for n in names if n not in self.sums or not self.sums[n].given.get(role)]


class ParityBlock:
    """The builds of a parity block of this node, for all generations of an epoch: see the module
    text. Thread-safe: the threads that serve the owners use it. The vault's lock guards its
    fields."""

    def __init__(
        self,
        store: SlotStore,
        scheme: Parity,
        number: int,
        place: tuple[parity_groups.ParityGroup, int],
    ) -> None:
        self._store = store
        self._gate = store.gate
        self._scheme = scheme
        self._epoch = scheme.record.epoch
        self._number = number
        self._group, self._index = place
        self._piece_bytes = min(store.settings.chunk_bytes, _MAX_PIECE_BYTES)
        self._wait_seconds = min(_WAIT_SECONDS, store.settings.connect_seconds / 4)
        known = {role: store.table.layout(role) for role in self._group.roles}
        self._layouts = {role: layout for role, layout in known.items() if layout is not None}
        self._reported: set[int] = set()  # roles whose layout has been received in this epoch
        self._builds: dict[records.Generation, BlockBuild] = {}
        # Memory is allocated for one generation at a time.
        self._creation_lock = threading.Lock()
        self._is_asking = self._is_over = False

    def cut(self) -> None:
        """Abandon unfinished generations: the epoch is over."""
        with self._gate.lock:
            self._is_over = True
            for generation in list(self._builds):
                self._give_up(generation)

    def _is_open(self) -> bool:
        return not self._is_over and self._gate.is_open(self._epoch)

    def _give_up(self, generation: records.Generation) -> None:
        build = self._builds.pop(generation)
        for name in build.sums:
            build.give_up(name)
        self._store.release(build.segment, build.slot)

    # Parts that an owner sends.

    def put(self, channel: Channel, offer: Offer) -> None:
        """Serve an offer of a role: receive the needed parts and answer ``taken``; if none are
        needed, answer ``sealed`` as soon as the block is sealed. Raises Refused, with WAITED when
        that takes too long."""
        with self._gate.changed:
            self._layouts[offer.role] = offer.layout
            self._reported.add(offer.role)
            self._gate.changed.notify_all()
            if not {*offer.parts} <= {*self._scheme.coded(offer.layout)}:
                raise Refused(Refusal.WRONG_BLOCK_PART)
        build = self._build_of(offer)
        needed = [] if build is None else self._needed(build, offer)
        channel.send({"t": "need", "parts": needed})
        if build is not None and needed:
            taken = [name for name in needed if self._take(channel, build, name, offer)]
            channel.send({"t": "taken", "parts": taken})
            return
        if build is not None:
            self._seal(offer.generation, build)
            self._await(build, offer)
        channel.send({"t": "sealed", "parts": offer.names})

    def _build_of(self, offer: Offer) -> BlockBuild | None:
        """Return the build of a generation; None when its block is sealed with these bytes."""
        store, generation = self._store, offer.generation
        with self._gate.changed:
            if not self._gate.changed.wait_for(
                lambda: not self._is_open() or not self._unreported(), self._wait_seconds
            ):
                self._ask_absent(generation, self._unreported())
                raise Refused(Refusal.WAITED)
            self._require_open()
            if (build := self._builds.get(generation)) is not None:
                return build
        if (sealed := self._sealed(generation)) is not None:
            if any(sealed[offer.role][name] != part for name, part in offer.parts.items()):
                raise Refused(Refusal.OTHER_BYTES)
            return None
        with self._gate.lock:
            # Owners send generations in order. So if a newer generation is held, this offer repeats
            # an old generation after a restart. It might find no slot, and its owner would wait for
            # one instead of sending newer generations.
            slots = store.table.sealed(self._number)
            if any(slot.generation > generation for slot in slots if slot.parts):
                raise Refused(Refusal.SUPERSEDED)
        with self._creation_lock:
            with self._gate.lock:
                build = self._builds.get(generation)
            return build or self._start_build(generation)

    def _unreported(self) -> list[int]:
        """Return roles that may have parts for the block, but have not sent a layout this epoch."""
        return [
            role
            for role in self._group.roles
            if role not in self._layouts or (role not in self._reported and self._coded(role))
        ]

    def _coded(self, role: int) -> list[str]:
        return self._scheme.coded(self._layouts[role])

    def _require_open(self) -> None:
        if not self._is_open():
            raise Refused(Refusal.STALE)

    def _sealed(self, generation: records.Generation) -> Mapping[int, Parts] | None:
        """Return the contributions to the sealed block, if it is complete."""
        store = self._store
        with self._gate.lock:
            places = store.table.find(self._number, generation, parity_groups.INPUTS)
            sealed = store.table.held(self._number).get(generation, set())
            expected = {role: {*self._coded(role)} for role in self._group.roles}
        if not places:
            return None
        inputs = memoryview(bytes(places[0].view))  # a newer block may overwrite the slot meanwhile
        found = checksum(inputs)
        if found != places[0].checksum:
            store.mark_bad(places[0], found)
            return None
        contributions = parity_groups.BlockInputs.decode(inputs).contributions
        whole = all(
            names <= sealed and names <= {*contributions.get(role, ())}
            for role, names in expected.items()
        )
        return contributions if whole else None

    def _start_build(self, generation: records.Generation) -> BlockBuild:
        """Start to build a generation in a free slot. Raises Refused."""
        store, roles = self._store, self._group.roles
        if slot_memory.own_slots_missing(store):
            raise Refused(Refusal.EARLY)
        try:
            # Not at the top: most vaults keep no parity and can do without numpy and its threads.
            from deadpool_megatron.vault.schemes.parity_code import Coder

            coder = Coder(len(roles), self._scheme.placement.parities)
            with self._gate.lock:
                layout = self._scheme.placement.layout(self._number, self._layouts)
                names = {name for role in roles for name in self._coded(role)}
            segment = slot_memory.ensure_copy(store, layout, generation)
            slot = self._claim(segment, generation)
            try:
                slot_memory.reserve(
                    store, segment, [parity_groups.INPUTS, *names], slot, generation
                )
                with self._gate.lock:
                    self._require_open()
                    for name in (parity_groups.INPUTS, *names):
                        store.open_part(segment, slot, name, self._epoch)

                    def combine(name: str) -> Combination:
                        view = segment.data(slot, name)
                        return coder.begin(range(len(roles)), len(roles) + self._index, view)

                    build = self._builds[generation] = BlockBuild(combine, segment, slot)
            except BaseException:
                store.release(segment, slot)
                raise
        except Refused:
            raise
        except (OSError, VaultError, ModuleNotFoundError) as error:
            raise Refused(Refusal.NO_BLOCK_POSSIBLE, str(error)) from error
        return build

    def _claim(self, segment: Segment, generation: records.Generation) -> int:
        # In a new epoch the block of the restored generation may combine more parts than before,
        # because peers with copies of these parts are lost. A restore may need the old block until
        # the new block is sealed.
        fresh = generation == self._scheme.record.restore.generation
        with self._gate.lock:
            slot = self._store.claim(segment, generation, self._epoch, fresh=fresh)
            # An owner sends the next generation only after this generation is complete.
            for newer in [build for build in self._builds if build > generation and slot is None]:
                self._give_up(newer)
        if slot is None:
            raise Refused(Refusal.EARLY)
        return slot

    def _needed(self, build: BlockBuild, offer: Offer) -> list[str]:
        """Return the parts that a role has not sent yet."""
        with self._gate.lock:
            return [
                name
                for name, part in offer.parts.items()
                if name not in build.sums or build.sums[name].given.get(offer.role) != part
            ]

    def _take(self, channel: Channel, build: BlockBuild, name: str, offer: Offer) -> bool:
        """Add the bytes of a part as they arrive; False if they are damaged. Raises
        ConnectionClosed when the part has been restarted meanwhile."""
        store, role, (nbytes, expected) = self._store, offer.role, offer.parts[name]
        index, digest = self._group.roles.index(role), xxhash.xxh3_64()
        buffer = memoryview(bytearray(min(nbytes, self._piece_bytes)))
        with self._gate.lock:
            if self._builds.get(offer.generation) is not build:
                raise ConnectionClosed("the block was restarted")
            total = build.sums.get(name)
            if total is None or role in total.given:  # arriving already, or arrived as other bytes
                total = build.begin(name)
            total.given[role] = None
        is_whole = False
        try:
            for start in range(0, nbytes, self._piece_bytes):
                piece = buffer[: nbytes - start]
                channel.receive_bulk(piece, digest.update)
                if not total.combination.add(index, start, piece):
                    raise ConnectionClosed("the part was restarted")
                store.reports.counters["bytes combined"] += len(piece)
                about = {"role": role, "iteration": offer.generation.iteration, "part": name}
                failpoints.hit("vault.combine", **about)
            is_whole = digest.intdigest() == expected
        finally:
            with self._gate.changed:
                is_current = self._builds.get(offer.generation) is build
                if is_current and build.sums[name] is total:
                    if is_whole:
                        total.given[role] = nbytes, expected
                    else:
                        build.begin(name)
                    self._gate.changed.notify_all()
        if not is_whole:
            where = f"from node {self._scheme.record.seats[role].node}"
            found = digest.intdigest()
            store.reports.corruption(role, offer.generation, name, where, expected, found)
        return is_whole

    # Sealing.

    def _absent(self, build: BlockBuild) -> list[int]:
        """Return the roles whose contribution is missing."""
        return [r for r in self._group.roles if build.lacks(r, self._coded(r))]

    def _seal(self, generation: records.Generation, build: BlockBuild) -> None:
        """Seal the block of a generation if all contributions are in it."""
        store = self._store
        with self._gate.lock:
            if build.is_sealed or build.is_being_sealed or self._absent(build):
                return
            build.is_being_sealed = True
            sums, segment, slot = dict(build.sums), build.segment, build.slot
            given = {
                role: {n: part for n in sorted(self._coded(role)) if (part := sums[n].given[role])}
                for role in self._group.roles
            }
        contributions = {role: parts for role, parts in given.items() if parts}
        inputs = parity_groups.BlockInputs(
            self._group.roles, self._index, self._scheme.placement.parities, contributions
        ).encode()
        # The list of contributions is sealed first, so that each sealed block has its list.
        view = segment.data(slot, parity_groups.INPUTS, len(inputs))
        view[:] = inputs
        parts = {parity_groups.INPUTS: (len(inputs), checksum(view))}
        for name in sorted({name for part in given.values() for name in part}):
            longest = max(part[name][0] for part in given.values() if name in part)
            parts[name] = longest, checksum(segment.data(slot, name, longest))

        def seal() -> None:
            for name, (nbytes, digest) in parts.items():
                store.seal_copy(segment, slot, name, nbytes, digest, self._epoch)

        with self._gate.changed:
            build.is_being_sealed = False
            is_current = self._builds.get(generation) is build and build.sums == sums
            if not is_current or not self._is_open():
                return
            store.table.replace(segment, slot, seal)
            build.is_sealed = True
            self._give_up(generation)
            self._gate.changed.notify_all()
        shards = [name for name in parts if name != parity_groups.INPUTS]
        store.fail_point_corrupt("vault.received", segment, slot, shards)

    def _await(self, build: BlockBuild, offer: Offer) -> None:
        """Wait until the block is sealed. Raises Refused."""
        generation = offer.generation

        def has_news() -> bool:
            is_current = self._builds.get(generation) is build
            is_lost = not is_current or bool(build.lacks(offer.role, offer.parts))
            return build.is_sealed or is_lost or not self._is_open()

        with self._gate.changed:
            has_changed = self._gate.changed.wait_for(has_news, self._wait_seconds)
            if build.is_sealed:
                return
            self._require_open()
            if not has_changed:
                self._ask_absent(generation, self._absent(build))
        raise Refused(Refusal.WAITED)

    def _ask_absent(self, generation: records.Generation, roles: Collection[int]) -> None:
        """Ask roles for their layouts, and to send again all parts of the generation that they have
        sent before. Called under the lock."""
        if not self._is_asking:
            self._is_asking = True  # set before the thread starts, which resets it at its end
            begin_thread(f"block-{self._number}", partial(self._ask, generation, roles))

    def _ask(self, generation: records.Generation, roles: Collection[int]) -> None:
        for role in roles:
            try:
                node = self._scheme.record.seats[role].node
                with contextlib.closing(self._gate.dial(node)) as channel:
                    about = {"role": role, "generation": generation.to_list()}
                    channel.send({"t": "describe", "again": self._gate.node, **about})
                    found = channel.receive()["layout"]
                layout = records.RoleLayout.from_dict(found) if found else None
            except (VaultError, *UNREACHABLE) as error:
                log.info("block %d: role %d: %s", self._number, role, error)
                continue
            with self._gate.changed:
                if layout is not None and layout.role == role and role not in self._reported:
                    self._layouts[role] = layout
                    self._reported.add(role)
                    self._gate.changed.notify_all()
        with self._gate.lock:
            self._is_asking = False
