"""Parity blocks made between vaults of this process: right, or not at all."""

from __future__ import annotations

import contextlib
import json
import random
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deadpool_megatron import failpoints
from deadpool_megatron.events import Event, Kind
from deadpool_megatron.layout import schemes
from deadpool_megatron.layout.parity_groups import MEMBERS, Members, ParityPlacement
from deadpool_megatron.layout.records import (
    EpochRecord,
    Generation,
    NodeAddress,
    Restore,
    RoleLayout,
    Seat,
)
from deadpool_megatron.layout.schemes import ProtectionPlan, Scheme
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault.core.state import VaultState
from deadpool_megatron.vault.core.traffic import Flow, Traffic
from deadpool_megatron.vault.errors import Refused
from deadpool_megatron.vault.schemes import parity_code as erasure
from deadpool_megatron.vault.schemes.parity import Parity
from deadpool_megatron.vault.schemes.parity_maker import BlockMaker
from deadpool_megatron.vault.server import Server
from deadpool_megatron.vault.shm.segment import Segment, SlotState, checksum, copy_name, own_name
from tests.common.threads import short_of_threads
from tests.vault.fake_network import FakeNetwork
from tests.vault.harness import make_layout, record_of, wait_until
from tests.vault.schemes.coded import GENERATION, CodedGroup, seal

SETTINGS = Settings(connect_seconds=0.8, chunk_bytes=4096)
OLDER, NEWER = Generation(1, 2), Generation(1, 4)
NAMES = ("shard", "tail")


class Makings:
    """Owners of roles 0 .. k-1 on the nodes of their numbers, whose vaults answer, and one holder.

    ``held``: what each role has of GENERATION.
    """

    def __init__(
        self, directory: Path, layouts: dict[int, RoleLayout], parities: int = 1, number: int = 0
    ) -> None:
        self.directory = directory
        self.layouts = layouts
        self.parities = parities
        self.number = number  # which of the blocks
        self.events: list[Event] = []
        self.network = FakeNetwork()
        self.servers: list[Server] = []
        nodes = range(len(layouts) + parities)
        self.transports = [self.network.transport("fake", node, 5.0) for node in nodes]
        self.held: dict[int, dict[str, bytes]] = {}
        self.states: dict[int, VaultState] = {}
        self.record = self.recorded(1, Restore("initial", Generation(1, 0)))
        (self.group,) = ParityPlacement.of_record(self.record).groups
        self.block, self.holder = self.group.blocks[number], self.group.holders[number]
        for node in (*layouts, self.holder):
            (directory / f"node{node}").mkdir()
            self.states[node] = self._state(node)
        self.state = self.states[self.holder]

    def _state(self, node: int) -> VaultState:
        return VaultState(node, self.directory / f"node{node}", SETTINGS, self.events.append)

    def recorded(self, epoch: int, restore: Restore, first_rack: str = "rack0") -> EpochRecord:
        racks = {n: f"rack{n}" for n in range(len(self.layouts) + self.parities)}
        racks[0] = first_rack
        return record_of(
            epoch,
            self.layouts,
            nodes={n: NodeAddress("fake", n, r, n >= len(self.layouts)) for n, r in racks.items()},
            restore=restore,
            replicas=self.parities,
            protection=ProtectionPlan(Scheme(schemes.Kind.PARITY, group=len(self.layouts))),
        )

    def own(self, role: int) -> Path:
        """File of a role's own slots."""
        return self.directory / f"node{role}" / own_name(role, Seat(role, 0, 0))

    def begin(self, held: dict[int, dict[str, bytes]]) -> None:
        """Have the owners hold this, and open epoch 1."""
        self.held = held
        for role, parts in held.items():
            seal(self.own(role), self.layouts[role], Seat(role, 0, 0), parts)
            self.states[role].table.scan()
            self.servers.append(Server(self.states[role], self.transports[role]))
            self.servers[-1].start()
        self.adopt(self.record)

    def adopt(self, record: EpochRecord) -> None:
        for state in self.states.values():
            state.adopt(record)

    def offer(self, role: int) -> dict[str, tuple[int, int]]:
        """What the vault of a role announces."""
        parts = {n: part for n, part in self.held[role].items() if n in NAMES}
        return {n: (len(part), checksum(memoryview(part))) for n, part in parts.items()}

    def announce(
        self,
        role: int,
        parts: dict[str, tuple[int, int]] | None = None,
        generation: Generation = GENERATION,
        epoch: int = 1,
        block: int | None = None,
    ) -> str:
        """The answer to it."""
        number, parts = block or self.block, self.offer(role) if parts is None else parts
        try:
            transport, layout = self.transports[self.holder], self.layouts[role]
            scheme = self.state.scheme(epoch)
            scheme.announced(self.state, transport, number, layout, generation, parts)
        except Refused as refused:
            return str(refused)
        return "sealed"

    def announce_all(self, roles: list[int]) -> None:
        """As the owners' vaults do: again and again, each by itself, until the block is sealed."""

        def insist(role: int) -> None:
            wait_until(lambda: self.announce(role) == "sealed", f"role {role} is acknowledged")

        threads = [threading.Thread(target=insist, args=(role,)) for role in roles]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)

    def maker(self, record: EpochRecord) -> BlockMaker:
        """One whose thread is the caller's, and to which all have announced GENERATION."""
        scheme, transport = Parity(record), self.transports[self.holder]
        block = scheme.placement.groups[0].blocks[self.number]
        maker = BlockMaker(self.state, transport, scheme, block)
        for role, layout in self.layouts.items():
            maker._learn(layout)
            wanted = {n: one for n, one in self.offer(role).items() if n in maker._expected[role]}
            maker._offer(role, GENERATION, wanted)
        return maker

    def made_of(self) -> Members:
        """What the sealed block says of itself."""
        (place,) = self.state.table.find(self.block, GENERATION, MEMBERS)
        return Members.decode(place.view)

    def corruptions(self) -> list[str]:
        return [str(e.data["where"]) for e in self.events if e.kind is Kind.CORRUPTION]

    def nothing_is_in_use(self) -> bool:
        tables = [state.table for state in self.states.values()]
        return not any(table.writers or any(table.pins.values()) for table in tables)

    def stop(self) -> None:
        for state in self.states.values():
            state.close(9)
        if self.state.ledger is not None:
            self.state.ledger.scheme.cut()
        for server in self.servers:
            server.stop()
        for transport in self.transports:
            transport.close()


Begin = Callable[..., Makings]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Two roles of which shards differ in length."""
    running: list[Makings] = []

    def start(parities: int = 1) -> Makings:
        coded = CodedGroup(2, parities, nbytes=20_000)
        layouts = {role: coded.layouts[role] for role in coded.group.roles}
        running.append(Makings(tmp_path, layouts, parities))
        running[-1].begin({r: {n: coded.part(r, n) for n in NAMES} for r in layouts})
        return running[-1]

    yield start
    for making in running:
        making.stop()
    failpoints.load(None)


@settings(max_examples=settings().max_examples // 4)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 1 << 30))
def test_whatever_order_and_faults_the_block_is_what_the_code_says(
    data: int, parities: int, seed: int
) -> None:
    """Announcements in any order, pieces damaged on the way, a role without one of the parts, and
    old bytes in the slot: sealed once, with what it is made of."""
    chance = random.Random(seed)
    lacking = chance.choice([None, *range(1, data)])
    coded = CodedGroup(data, parities, chance.randint(13_000, 30_000), lacking)
    layouts = {role: coded.layouts[role] for role in coded.group.roles}
    with tempfile.TemporaryDirectory() as directory:
        making = Makings(Path(directory), layouts, parities, chance.randrange(parities))
        try:
            making.begin(
                {r: {n: coded.part(r, n) for n in layouts[r].shard_parts} for r in layouts}
            )
            placed = ParityPlacement.of_record(making.record)
            segment = making.state.ensure_copy(placed.layout(making.block, layouts))
            segment.reserve(NAMES, [0])
            segment.data(0, "shard")[:] = chance.randbytes(segment.capacity("shard"))
            victims = chance.sample(sorted(layouts), chance.randint(0, min(2, data)))
            faults = Path(directory) / "faults.json"
            at = {"point": "vault.chunk", "action": "mark"}
            plan = [
                {"id": f"wire{r}", "match": {"role": r, "part": "shard"}, "nth": n, **at}
                for r, n in ((r, chance.randint(1, 2)) for r in victims)
            ]
            faults.write_text(json.dumps(plan))
            failpoints.load(faults)
            making.announce_all(chance.sample(sorted(layouts), data))
            failpoints.load(None)
            held = making.state.table.parts(making.block, GENERATION)
            assert held == {MEMBERS, *NAMES}
            for name in NAMES:
                (place,) = making.state.table.find(making.block, GENERATION, name)
                assert bytes(place.view) == coded.parity(making.number, name)
                assert place.checksum == checksum(place.view)
            members = making.made_of()
            assert members.contributions == coded.members(making.number).contributions
            assert (members.number, members.parities) == (making.number, parities)
            # Of two that are damaged at once the first to be found out is reported.
            reported = set(making.corruptions())
            assert reported <= {f"from node {r}" for r in victims}
            assert bool(reported) == bool(victims)
            wait_until(making.nothing_is_in_use, "slots are given back")
        finally:
            making.stop()
            failpoints.load(None)


def test_what_is_refused(begin: Begin) -> None:
    making = begin(parities=2)
    assert making.announce(0, block=77) == "no such parity block"
    assert making.announce(0, block=making.group.blocks[1]) == "parity block of another node"
    assert making.announce(0, {"extras@step": (3, 4)}) == "unknown part of a parity block"
    assert making.announce(0, epoch=2) == "stale"
    making.state.close(1)
    assert making.announce(0) == "stale"
    assert not making.state.table.writers


def test_nothing_is_fetched_before_all_have_announced(begin: Begin) -> None:
    """A role that has not sealed the generation yet is not waited for in a slot."""
    making = begin()
    making.states[1].table.mark_bad(making.states[1].table.find(1, GENERATION, "tail")[0])
    assert making.announce(0) == "waited"
    assert making.announce(0) == "waited"
    assert not making.state.reports.counters["bytes combined"]
    assert copy_name(making.block) not in making.state.table.segments


def test_a_sealed_block_is_acknowledged_again(begin: Begin) -> None:
    """For the very bytes that it was made of; older generations are superseded by it."""
    making = begin()
    making.announce_all([0, 1])
    combined = making.state.reports.counters["bytes combined"]
    for role in (0, 1):
        assert making.announce(role) == "sealed"
    assert making.state.reports.counters["bytes combined"] == combined
    why = making.announce(0, {**making.offer(0), "shard": (5000, 77)})
    assert why == "other bytes than a sealed parity block was made of"
    assert making.announce(0, generation=OLDER) == "superseded"


def test_a_slot_that_is_given_away_while_its_list_is_read_offends_nobody(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block of the generation after next may take it, once it has been looked up."""
    making = begin()
    making.announce_all([0, 1])
    (place,) = making.state.table.find(making.block, GENERATION, MEMBERS)

    def overtaken(view: memoryview) -> int:
        found = checksum(view)
        place.view[:] = bytes(len(place.view))
        return found

    monkeypatch.setattr("deadpool_megatron.vault.schemes.parity_maker.checksum", overtaken)
    assert making.announce(0) == "sealed", "it was when it was read"


def test_who_does_not_announce_is_asked(begin: Begin) -> None:
    """One vault has forgotten that it was acknowledged, and the block was damaged since: the other
    owner, who announces nothing, still has what it was made of."""
    making = begin()
    making.announce_all([0, 1])
    making.state.table.find(making.block, GENERATION, MEMBERS)[0].view[5] ^= 0x10
    wait_until(lambda: making.announce(0) == "sealed", "it was made again")
    assert making.corruptions() == [f"slot copy-{making.block}.seg"]
    assert set(making.made_of().contributions) == {0, 1}


def test_who_has_forgotten_an_old_one_is_not_kept_from_the_newest(begin: Begin) -> None:
    """Both slots are taken by newer ones, the second of which waits for just him."""
    making = begin()
    placed = ParityPlacement.of_record(making.record)
    segment = making.state.ensure_copy(placed.layout(making.block, making.layouts))
    for generation in (GENERATION, NEWER):
        slot = making.state.claim(segment, generation, 1)
        assert slot is not None
        if generation == GENERATION:
            segment.reserve(["shard"], [slot])
            assert making.state.seal_copy(segment, slot, "shard", 0, 0, 1)
            making.state.release(segment, slot)
    assert making.announce(0, generation=OLDER) == "superseded"


def test_a_holder_that_lacks_the_package_says_so(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object) -> None:
        raise ModuleNotFoundError("No module named 'zfec'")

    making = begin()
    monkeypatch.setattr(erasure, "Coder", missing)
    assert [making.announce(role) for role in (0, 1)] == ["waited", "waited"]
    refused = [event.data["why"] for event in making.events if event.kind is Kind.REFUSED]
    assert refused == ["no parity block possible: No module named 'zfec'"]
    assert not making.state.table.writers


def test_an_owner_that_has_other_bytes_than_it_announced_is_asked(begin: Begin) -> None:
    """Nothing is made of what is not there; the announcement of the other one still holds."""
    making = begin()
    assert making.announce(0) == "waited"
    assert making.announce(1, {**making.offer(1), "shard": (5000, 77)}) != "sealed"
    wait_until(lambda: making.announce(1) == "sealed", "what it really has goes into the block")
    assert making.made_of().contributions[1] == making.offer(1)
    assert making.announce(0) == "sealed"


def test_what_protects_is_sent_as_one_shipment_at_its_pace(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All parts of a role for one block, under the pace of the role; and it is counted before the
    block counts."""
    making = begin()
    flows: list[tuple[int, Generation, int]] = []
    sent: list[tuple[int, int]] = []
    opened, ended = Traffic.flow, Flow.end

    def flow(self: Traffic, role: int, generation: Generation, nbytes: int, *rest: Any) -> Flow:
        flows.append((role, generation, nbytes))
        return opened(self, role, generation, nbytes, *rest)

    def end(self: Flow, node: int) -> None:
        sent.append((self.role, self.sent_bytes))
        ended(self, node)

    monkeypatch.setattr(Traffic, "flow", flow)
    monkeypatch.setattr(Flow, "end", end)
    making.announce_all([0, 1])
    sizes = {role: sum(size for size, _ in making.offer(role).values()) for role in (0, 1)}
    assert sorted(flows) == [(role, GENERATION, sizes[role]) for role in (0, 1)]
    assert sorted(sent) == sorted(sizes.items())
    for role, nbytes in sizes.items():
        state = making.states[role]
        assert state.reports.counters["bytes shipped"] == state._shipped[role] == nbytes
        assert not state.reports.counters["bytes fetched from here"]


def test_who_has_less_of_a_part_may_wait_for_who_has_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For longer than a connection may stand still: what he has of the next part is more than a
    socket takes."""
    large = {0: {"shard": b"s", "tail": b"t" * (2 << 20)}, 1: {"shard": b"S" * 9000, "tail": b"T"}}
    layouts = {}
    for role, parts in large.items():
        layout = make_layout(role, len(parts["shard"]))
        sized = [replace(p, nbytes=len(parts.get(p.name, b"extras"))) for p in layout.parts]
        layouts[role] = replace(layout, parts=tuple(sized))
    making = Makings(tmp_path, layouts)
    making.transports[0] = making.network.transport("fake", 0, 0.1)
    pieces = Flow.pieces

    def slow(self: Flow, view: memoryview, going: Callable[[], bool]) -> Iterator[memoryview]:
        for number, piece in enumerate(pieces(self, view, going)):
            if self.role == 1 and number == 1:
                # Role 0 has sent its shard. Five times as long as its connection may stand still.
                with contextlib.suppress(AssertionError):
                    wait_until(lambda: not making.servers[0]._channels, "role 0 gives up", 0.5)
            yield piece

    monkeypatch.setattr(Flow, "pieces", slow)
    try:
        making.begin(large)
        assert making.announce(0) == "waited"
        wait_until(lambda: making.announce(1) == "sealed", "the block is made", 4.0)
        (place,) = making.state.table.find(making.block, GENERATION, "tail")
        assert bytes(place.view[:2]) == bytes([ord("t") ^ ord("T"), ord("t")])
    finally:
        making.stop()


def test_what_an_owner_stops_to_send_is_not_taken_for_damaged(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its epoch was closed in the middle; bytes that were not sent were not compared either."""
    making = begin()
    monkeypatch.setattr(Flow, "pieces", lambda self, view, going: iter([view[:100]]))
    assert [making.announce(role) for role in (0, 1)] == ["waited", "waited"]
    wait_until(lambda: making.states[1].reports.counters["bytes shipped"], "it has begun to send")
    assert not making.corruptions()
    for role in making.layouts:
        assert making.states[role].table.parts(role, GENERATION) == set(NAMES)
    assert making.state.reports.counters["bytes combined"] == 0
    assert not making.state.table.parts(making.block, GENERATION)


def test_closed_between_the_last_byte_and_the_seal(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    making = begin()
    maker = making.maker(making.record)
    monkeypatch.setattr(maker._owners, "finish", lambda _: making.state.close(1))
    assert not maker._made(GENERATION)
    maker._owners.close()
    assert not making.state.inventory().holdings
    assert not making.state.table.writers


def test_a_moment_without_threads_puts_a_block_off(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    making = begin()
    refused = short_of_threads(monkeypatch, "block-")
    assert making.announce(0).startswith("early")
    assert refused
    making.announce_all([0, 1])


# A block that has to hold more in the next epoch.


class Uncovered(Makings):
    """Roles 0 and 1 hold equal bytes of "tail". While they sit in two racks these are in no block;
    in epoch 2 they share a rack."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, {role: shared_tail(role) for role in (0, 1)})
        parts = {"shard": b"s" * 3000, "tail": b"t" * 1000}
        self.begin({0: parts, 1: parts})
        self.maker(self.record)._make(GENERATION)
        self.second = self.recorded(2, Restore("memory", GENERATION, "step"), "rack1")
        for state in self.states.values():
            state.close(1)
        self.adopt(self.second)

    def held_parts(self) -> tuple[set[str], set[str]]:
        """Parts of the block, and those that it says it was made of."""
        held = self.state.table.parts(self.block, GENERATION)
        contributions = self.made_of().contributions
        return held - {MEMBERS}, {name for one in contributions.values() for name in one}


def shared_tail(role: int) -> RoleLayout:
    layout = make_layout(role, nbytes=3000, peers=(0, 1))
    parts = [replace(p, replicas=(0, 1)) if p.name == "tail" else p for p in layout.parts]
    return replace(layout, parts=tuple(parts))


@pytest.fixture
def uncovered(tmp_path: Path) -> Iterator[Uncovered]:
    making = Uncovered(tmp_path)
    yield making
    making.stop()


def test_a_block_that_has_to_hold_more_is_made_beside_the_one_that_counts(
    uncovered: Uncovered, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is lost meanwhile comes back from the old one (rule 3)."""
    only_shard = {"shard"}, {"shard"}
    assert uncovered.held_parts() == only_shard
    maker = uncovered.maker(uncovered.second)
    before: list[object] = []
    monkeypatch.setattr(maker._owners, "finish", lambda _: before.append(uncovered.held_parts()))
    maker._make(GENERATION)
    assert before == [only_shard, only_shard]
    assert uncovered.held_parts() == ({"shard", "tail"}, {"shard", "tail"})
    assert not uncovered.state.table.writers
    slots = [slot for slot in uncovered.state.table.sealed(uncovered.block) if slot.parts]
    assert [slot.generation for slot in slots] == [GENERATION]


@pytest.mark.parametrize("sealed", [0, 1, 3])
def test_a_vault_that_dies_between_two_blocks_has_one_of_them(
    uncovered: Uncovered, sealed: int
) -> None:
    """Killed after so many parts of the new one; three are all."""
    maker = uncovered.maker(uncovered.second)

    class Killed(Exception):
        pass

    done: list[str] = []

    def seal_part(segment: Segment, slot: int, name: str, *rest: object) -> None:
        if len(done) == sealed:
            raise Killed
        done.append(name)
        original(segment, slot, name, *rest)  # type: ignore[arg-type]

    original, empty = Segment.seal_part, Segment.set_state

    def set_state(segment: Segment, slot: int, state: SlotState) -> None:
        if state is SlotState.EMPTY and len(done) == sealed:
            raise Killed
        empty(segment, slot, state)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Segment, "seal_part", seal_part)
        patch.setattr(Segment, "set_state", set_state)
        with pytest.raises(Killed):
            maker._make(GENERATION)
    maker._owners.close()
    uncovered.state = uncovered.states[uncovered.holder] = uncovered._state(uncovered.holder)
    uncovered.state.table.scan()
    wanted = {"shard", "tail"} if sealed == 3 else {"shard"}
    assert uncovered.held_parts() == (wanted, wanted)
