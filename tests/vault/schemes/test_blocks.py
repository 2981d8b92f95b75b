"""Parity blocks made of what owners put, between vaults of this process: right, or not at all."""

import json
import random
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from deadpool_megatron import failpoints
from deadpool_megatron.events import Event, Kind
from deadpool_megatron.layout import records, schemes
from deadpool_megatron.layout.parity_groups import INPUTS, BlockInputs, ParityPlacement
from deadpool_megatron.layout.records import EpochRecord, Generation, NodeAddress, Restore, Seat
from deadpool_megatron.layout.schemes import ProtectionPlan, SchemeNumbers
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault import errors, replicate, slot_memory, slot_store
from deadpool_megatron.vault.peer_server import Server
from deadpool_megatron.vault.schemes.parity import Parity, ParityBlock
from deadpool_megatron.vault.schemes.registry import scheme_of
from deadpool_megatron.vault.shm.segment import Segment, SlotState, checksum, copy_name, own_name
from deadpool_megatron.wire.framing import WireError
from tests.vault.fake_network import FakeNetwork
from tests.vault.harness import make_layout, record_of, wait_until
from tests.vault.schemes.coded import GENERATION, CodedGroup, seal

SETTINGS = Settings(connect_seconds=0.8, chunk_bytes=4096)
OLDER, NEWER = Generation(1, 2), Generation(1, 4)
NAMES = ("shard", "tail")
Parts = dict[str, bytes]


class Making:
    """Owners of roles 0 .. k-1 on the nodes of their numbers, and one holder. All vaults answer."""

    def __init__(
        self,
        directory: Path,
        held: dict[int, Parts],
        layouts: dict[int, records.RoleLayout],
        **more: int,
    ) -> None:
        self.directory, self.held, self.layouts = directory, held, layouts
        self.parities = more.get("parities", 1)
        self.events: list[Event] = []
        self.network = FakeNetwork()
        self.record = self.recorded(1, Restore("initial", Generation(1, 0)))
        (self.group,) = ParityPlacement.of_record(self.record).groups
        self.number = more.get("number", 0)  # which of the blocks
        self.block, self.holder = self.group.blocks[self.number], self.group.holders[self.number]
        self.transports = {
            n: self.network.transport("fake", n, 5.0) for n in (*layouts, self.holder)
        }
        self.states = {node: self.begin(node) for node in self.transports}
        self.servers = {n: Server(state, self.transports[n]) for n, state in self.states.items()}
        self.senders: list[replicate.Sender] = []
        for server in self.servers.values():
            server.start()
        self.adopt(self.record)

    @property
    def state(self) -> slot_store.SlotStore:
        return self.states[self.holder]

    def begin(self, node: int) -> slot_store.SlotStore:
        directory = self.directory / f"node{node}"
        directory.mkdir(exist_ok=True)
        if node in self.held:
            seat = Seat(node, 0, 0)
            seal(directory / own_name(node, seat), self.layouts[node], seat, self.held[node])
        transport = self.transports[node]
        state = slot_store.SlotStore(
            scheme_of, node, directory, SETTINGS, self.events.append, transport
        )
        state.table.scan()
        return state

    def recorded(self, epoch: int, restore: Restore, first_rack: str = "rack0") -> EpochRecord:
        racks = {n: f"rack{n}" for n in range(len(self.layouts) + self.parities)}
        racks[0] = first_rack
        return record_of(
            epoch,
            self.layouts,
            nodes={n: NodeAddress("fake", n, r, n >= len(self.layouts)) for n, r in racks.items()},
            restore=restore,
            replicas=self.parities,
            protection=ProtectionPlan(
                SchemeNumbers(schemes.SchemeKind.PARITY, group=len(self.layouts))
            ),
        )

    def adopt(self, record: EpochRecord) -> None:
        self.record = record
        for state in self.states.values():
            state.adopt(record)

    def tell(self) -> None:
        """All owners have said what they consist of."""
        scheme = self.state.ledger.require_scheme(self.record.epoch)
        assert isinstance(scheme, Parity)
        block = scheme.block(self.block, 0)
        block._layouts |= self.layouts
        block._reported |= {*self.layouts}

    def start(self, *roles: int) -> None:
        """Have vaults of owners bring what they owe to the holder."""
        for role in roles:
            state, layout = self.states[role], self.layouts[role]
            scheme = state.ledger.require_scheme(self.record.epoch)
            targets = scheme.owed(layout).names
            (target,) = (one for one in targets if one.block == self.block)
            sender = replicate.sender_to(target, state, layout, scheme)
            self.senders.append(sender)
            sender.start()

    def acknowledged(self, role: int) -> bool:
        ledger = self.states[role].ledger
        return {*NAMES} <= ledger._acknowledged._names.get((role, GENERATION, self.holder), set())

    def made_of(self) -> BlockInputs:
        """What the sealed block says of itself."""
        (place,) = self.state.table.find(self.block, GENERATION, INPUTS)
        return BlockInputs.decode(place.view)

    def held_parts(self) -> tuple[set[str], set[str]]:
        """Parts of the block, and those that it says it was made of."""
        held = self.state.table.held(self.block).get(GENERATION, set())
        contributions = self.made_of().contributions
        return held - {INPUTS}, {name for one in contributions.values() for name in one}

    def is_right(self) -> bool:
        """Whether the block (an XOR) is there, and what it has to be."""
        for name in NAMES:
            parts = [self.held[role][name] for role in self.layouts]
            total = 0
            for part in parts:
                total ^= int.from_bytes(part, "little")
            (place,) = self.state.table.find(self.block, GENERATION, name)
            if bytes(place.view) != total.to_bytes(max(map(len, parts)), "little"):
                return False
        return True

    def corruptions(self) -> list[str]:
        return [str(e.data["where"]) for e in self.events if e.kind is Kind.CORRUPTION]

    def nothing_is_in_use(self) -> bool:
        return not any(state.table.writers for state in self.states.values())

    def stop(self) -> None:
        for state in self.states.values():
            state.close(9)
        for sender in self.senders:
            sender.cut()
        for server in self.servers.values():
            server.stop()
        for transport in self.transports.values():
            transport.close()


class Owner:
    """A vault's connection to the holder, one message after the other."""

    def __init__(self, making: Making, role: int) -> None:
        self.making, self.role = making, role
        self.channel = making.transports[role].connect(making.holder, "fake", making.holder)
        self.channel.send({"t": "offer", "layout": making.layouts[role].to_dict()})

    def put(
        self,
        parts: dict[str, tuple[int, int]] | None = None,
        generation: Generation = GENERATION,
        **more: Any,
    ) -> str | list[str]:
        """The parts that are needed, or why it is refused."""
        if parts is None:
            held = {name: memoryview(part) for name, part in self.making.held[self.role].items()}
            parts = {name: (len(part), checksum(part)) for name, part in held.items()}
        answer = self._ask(
            {
                "t": "put",
                "block": self.making.block,
                "epoch": self.making.record.epoch,
                "node": self.role,
                "role": self.role,
                "generation": generation.to_list(),
                "layout_hash": self.making.layouts[self.role].layout_hash,
                "parts": [[name, *pair] for name, pair in parts.items()],
                **more,
            }
        )
        return str(answer["why"]) if answer["t"] == "refused" else list(answer["parts"])

    def give(self, name: str, nbytes: int | None = None) -> None:
        """Send bytes of a part."""
        self.channel.send_bulk(memoryview(self.making.held[self.role][name])[:nbytes])

    def answer(self) -> str:
        answer = self.channel.receive()
        return str(answer["why"] if answer["t"] == "refused" else answer["t"])

    def bring(self, **more: Any) -> str:
        """Put all, and send what is needed."""
        needed = self.put(**more)
        if isinstance(needed, str):
            return needed
        for name in needed:
            self.give(name)
        return self.answer()

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        self.channel.send(message)
        return self.channel.receive()


Begin = Callable[..., Making]


@pytest.fixture
def begin(tmp_path):
    """Roles of which shards differ in length; all have said what they consist of."""
    running: list[Making] = []

    def start(data: int = 2, told: bool = True, parities: int = 1) -> Making:
        coded = CodedGroup(data, parities, nbytes=20_000)
        layouts = {role: coded.layouts[role] for role in coded.group.roles}
        held = {r: {n: coded.part(r, n) for n in NAMES} for r in layouts}
        running.append(Making(tmp_path, held, layouts, parities=parities))
        if told:
            running[-1].tell()
        return running[-1]

    yield start
    for making in running:
        making.stop()
    failpoints.load(None)


@settings(max_examples=settings().max_examples // 4)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 1 << 30))
def test_block_is_right_in_any_order_and_with_faults(data, parities, seed):
    """Owners in any order, pieces damaged on the way, a role without one of the parts, and old
    bytes in the slot: sealed once, with what it is made of."""
    chance = random.Random(seed)
    lacking = chance.choice([None, *range(1, data)])
    coded = CodedGroup(data, parities, chance.randint(13_000, 30_000), lacking)
    layouts = {role: coded.layouts[role] for role in coded.group.roles}
    held = {r: {n: coded.part(r, n) for n in layouts[r].shard_parts} for r in layouts}
    number = chance.randrange(parities)
    with tempfile.TemporaryDirectory() as directory:
        making = Making(Path(directory), held, layouts, parities=parities, number=number)
        try:
            placed = ParityPlacement.of_record(making.record)
            segment = slot_memory.ensure_copy(
                making.state, placed.layout(making.block, layouts), GENERATION
            )
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
            making.start(*chance.sample(sorted(layouts), data))
            for role in layouts:
                if role != lacking:
                    wait_until(lambda: making.acknowledged(role), f"role {role} is acknowledged")  # noqa: B023
            failpoints.load(None)
            assert making.state.table.held(making.block)[GENERATION] == {INPUTS, *NAMES}
            for name in NAMES:
                (place,) = making.state.table.find(making.block, GENERATION, name)
                assert bytes(place.view) == coded.parity(number, name)
                assert place.checksum == checksum(place.view)
            members = making.made_of()
            assert members.contributions == coded.members(number).contributions
            assert (members.number, members.parities) == (number, parities)
            # Where two are damaged at once the part is begun again before the other is found out.
            reported = {*making.corruptions()}
            assert reported <= {f"from node {r}" for r in victims}
            assert bool(reported) == bool(victims)
            assert making.nothing_is_in_use()
        finally:
            making.stop()
            failpoints.load(None)


def test_block_refuses_wrong_offers(begin):
    making = begin(parities=2)
    owner = Owner(making, 0)
    assert owner.put(block=77) == "no such parity block"
    assert owner.put(block=making.group.blocks[1]) == "parity block of another node"
    assert owner.put({"extras@step": (3, 4)}) == "unknown part of a parity block"
    assert owner.put(epoch=2) == "early"
    making.state.close(1)
    assert owner.put() == "stale"
    assert making.nothing_is_in_use()


def test_block_takes_no_part_before_all_layouts_are_known(begin):
    making = begin(told=False)
    making.network.cut.add(("fake", 1))
    owner = Owner(making, 0)
    assert [owner.put(), owner.put()] == ["waited", "waited"]
    assert copy_name(making.block) not in making.state.table.segments
    making.network.cut.clear()  # who has not come is asked
    wait_until(lambda: owner.put() == [*NAMES], "role 1 has been asked")


def test_a_sealed_block_is_acknowledged_again(begin):
    """For the very bytes that it was made of; older generations are superseded by it."""
    making = begin()
    owners = [Owner(making, role) for role in (0, 1)]
    assert [owner.bring() for owner in owners] == ["taken", "taken"]
    assert owners[0].put() == []
    assert owners[0].answer() == "sealed"
    assert making.is_right()
    for owner in owners:
        assert owner.bring() == "sealed"
    why = "other bytes than a sealed parity block was made of"
    assert owners[0].put({"shard": (5000, 77)}) == why
    assert owners[0].put(generation=OLDER) == "superseded"
    assert making.nothing_is_in_use()


def test_slot_reused_while_its_members_are_read_is_no_error(begin, monkeypatch):
    """The block of the generation after next may take it, once it has been looked up."""
    making = begin()
    making.start(0, 1)
    wait_until(lambda: making.acknowledged(0) and making.acknowledged(1), "it is sealed")
    (place,) = making.state.table.find(making.block, GENERATION, INPUTS)

    def overtaken(view: memoryview) -> int:
        found = checksum(view)
        place.view[:] = bytes(len(place.view))
        return found

    monkeypatch.setattr("deadpool_megatron.vault.schemes.parity.checksum", overtaken)
    assert Owner(making, 0).bring() == "sealed", "it was when it was read"


def test_holder_requests_parts_of_a_lost_sealed_block(begin):
    """One vault has forgotten that it was acknowledged, and the block was damaged since: the other
    owner, who had nothing more to bring, still has what it was made of."""
    making = begin()
    making.start(0, 1)
    wait_until(lambda: making.acknowledged(0) and making.acknowledged(1), "it is sealed")
    making.state.table.find(making.block, GENERATION, INPUTS)[0].view[5] ^= 0x10
    making.states[0].ledger.forget(0, GENERATION, making.holder)
    wait_until(lambda: making.acknowledged(0) and making.acknowledged(1), "it was made again")
    assert making.corruptions() == [f"slot copy-{making.block}.seg"]
    assert making.is_right()


def test_restarted_owner_is_not_kept_from_the_newest_block(begin):
    """Both slots are taken by newer ones, the second of which waits for just him."""
    making = begin()
    assert [Owner(making, role).bring() for role in (0, 1)] == ["taken", "taken"]
    assert Owner(making, 1).bring() == "sealed"
    assert Owner(making, 1).bring(generation=NEWER) == "taken"
    assert Owner(making, 0).put(generation=OLDER) == "superseded"
    assert Owner(making, 0).bring(generation=NEWER) == "taken"
    assert Owner(making, 0).bring(generation=NEWER) == "sealed"


def test_unfinished_block_gives_way_to_an_older_generation(begin):
    """No slot is free for it: who puts the older one puts the newer one afterwards only."""
    making = begin()
    for generation in (GENERATION, NEWER):
        assert Owner(making, 1).bring(generation=generation) == "taken"
    assert Owner(making, 0).put(generation=OLDER) == "early"
    assert Owner(making, 0).put(generation=OLDER) == [*NAMES]


@pytest.mark.parametrize(
    ("what", "lack"),
    [
        ("parity_code.Coder", ModuleNotFoundError("No module named 'zfec'")),
        ("parity.slot_memory.reserve", errors.OutOfSpace("9 bytes needed")),
    ],
)
def test_holder_names_the_part_that_it_lacks(begin, monkeypatch, what, lack):
    def missing(*_: object) -> None:
        raise lack

    making = begin()
    with monkeypatch.context() as patched:
        patched.setattr(f"deadpool_megatron.vault.schemes.{what}", missing)
        assert Owner(making, 0).put() == "no parity block possible"
    (told,) = (event.data["why"] for event in making.events if event.kind is Kind.REFUSED)
    assert str(lack) in told
    assert making.nothing_is_in_use()
    assert Owner(making, 0).put() == [*NAMES], "it is there by now"


def test_other_bytes_take_the_place_of_those_before(begin):
    """Nothing is made of both; what others have put into the part is needed again."""
    making = begin()
    shard = making.held[0]["shard"]
    making.held[0]["shard"] = shard[::-1]
    owners = [Owner(making, role) for role in (0, 1)]
    assert owners[0].bring() == "taken"
    making.held[0]["shard"] = shard
    assert owners[1].bring() == "taken"
    assert owners[0].put() == ["shard"]
    owners[0].give("shard")
    assert owners[0].answer() == "taken"
    assert owners[1].bring() == "taken"
    assert [owner.bring() for owner in owners] == ["sealed", "sealed"]
    assert making.is_right()


@pytest.mark.parametrize("breaks", [True, False], ids=["breaks", "stalls"])
def test_half_a_part_is_in_no_block(begin, breaks):
    """The connection breaks, or another one comes in its place: the part is begun again, and what
    the old connection still brings is not added."""
    making = begin()
    first, other = Owner(making, 0), Owner(making, 1)
    assert other.bring() == "taken"
    counters = making.state.reports.counters
    before = counters["bytes combined"]
    assert first.put() == [*NAMES]
    first.give("shard", 9000)
    wait_until(lambda: counters["bytes combined"] == before + 8192, "half is in")
    if breaks:
        first.channel.close()
        wait_until(lambda: other.put() == ["shard"] or not other.answer(), "it is needed again")
        other.give("shard")
        assert other.answer() == "taken"
    again = Owner(making, 0)
    assert again.bring() == "taken"
    if not breaks:
        first.channel.send_bulk(memoryview(making.held[0]["shard"])[9000:])
        with pytest.raises((WireError, OSError)):
            first.answer()
        assert other.bring() == "taken"
    assert again.bring() == "sealed"
    assert making.is_right()
    assert not making.corruptions()


def test_closed_between_the_last_byte_and_the_seal(begin, monkeypatch):
    making = begin()
    seal_it = ParityBlock._seal

    def closed(block: ParityBlock, *about: Any) -> None:
        making.state.close(1)
        seal_it(block, *about)

    monkeypatch.setattr(ParityBlock, "_seal", closed)
    owners = [Owner(making, role) for role in (0, 1)]
    assert [owner.bring() for owner in owners] == ["taken", "taken"]
    assert owners[0].bring() == "stale"
    assert not making.state.inventory().holdings
    making.adopt(making.recorded(2, Restore("initial", Generation(2, 0))))
    assert making.nothing_is_in_use()


def test_after_a_cut_nothing_is_written_into_the_slot(begin):
    """The next epoch may have given it to somebody else."""
    making = begin()
    owner = Owner(making, 0)
    assert owner.put() == [*NAMES]
    owner.give("shard", 4096)
    wait_until(lambda: making.state.reports.counters["bytes combined"] == 4096, "some is in")
    making.adopt(making.recorded(2, Restore("initial", Generation(2, 0))))
    assert making.nothing_is_in_use()
    (segment,) = (s for s in making.state.table.segments.values() if s.seat is None)
    before = bytes(segment.contents)
    owner.channel.send_bulk(memoryview(making.held[0]["shard"])[4096:])
    with pytest.raises((WireError, OSError)):
        owner.answer()
    assert bytes(segment.contents) == before


# A block that has to hold more in the next epoch.


@pytest.fixture
def uncovered(tmp_path):
    """Roles 0 and 1 hold equal bytes of "tail". While they sit in two racks these are in no block;
    in epoch 2 they share a rack."""
    layouts = {}
    for role in (0, 1):
        layout = make_layout(role, nbytes=3000, peers=(0, 1))
        parts = [replace(p, replicas=(0, 1)) if p.name == "tail" else p for p in layout.parts]
        layouts[role] = replace(layout, parts=tuple(parts))
    held = {"shard": b"s" * 3000, "tail": b"t" * 1000}
    making = Making(tmp_path, {0: held, 1: held}, layouts)
    making.tell()
    shard = {"shard": (3000, checksum(memoryview(held["shard"])))}
    owners = [Owner(making, role) for role in (0, 1)]
    assert [one.bring(parts=shard) for one in (*owners, owners[0])] == ["taken", "taken", "sealed"]
    assert making.held_parts() == ({"shard"}, {"shard"})
    for state in making.states.values():
        state.close(1)
    making.adopt(making.recorded(2, Restore("memory", GENERATION, "step"), "rack1"))
    yield making
    making.stop()


def bring_all(making: Making) -> Owner:
    """Everything is in the block, which is not sealed yet."""
    owners = [Owner(making, role) for role in (0, 1)]
    wait_until(lambda: owners[0].bring() == "taken", "one")
    wait_until(lambda: owners[1].bring() == "taken", "the other")
    wait_until(lambda: owners[0].put() == [], "all is in")
    return owners[0]


def test_a_block_that_has_to_hold_more_is_made_beside_the_one_that_counts(uncovered, monkeypatch):
    """Whoever is lost meanwhile comes back from the old one (rule 3)."""
    before = []
    replaced = uncovered.state.table.replace

    def replace_it(*about: Any) -> None:
        before.append(uncovered.held_parts())
        replaced(*about)

    monkeypatch.setattr(uncovered.state.table, "replace", replace_it)
    assert bring_all(uncovered).answer() == "sealed"
    assert before == [({"shard"}, {"shard"})]
    assert uncovered.held_parts() == ({"shard", "tail"}, {"shard", "tail"})
    assert uncovered.nothing_is_in_use()
    slots = [slot for slot in uncovered.state.table.sealed(uncovered.block) if slot.parts]
    assert [slot.generation for slot in slots] == [GENERATION]


@pytest.mark.parametrize("sealed", [0, 1, 3])
def test_a_vault_that_dies_between_two_blocks_has_one_of_them(uncovered, sealed):
    """Killed after so many parts of the new one; three are all."""

    class Killed(OSError):
        pass

    done: list[str] = []

    def seal_part(segment: Segment, slot: int, name: str, *rest: Any) -> None:
        if len(done) == sealed:
            raise Killed
        done.append(name)
        original(segment, slot, name, *rest)

    original, empty = Segment.seal_part, Segment.set_state

    def set_state(segment: Segment, slot: int, state: SlotState) -> None:
        if state is SlotState.EMPTY and len(done) == sealed:
            raise Killed
        empty(segment, slot, state)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Segment, "seal_part", seal_part)
        patch.setattr(Segment, "set_state", set_state)
        with pytest.raises((WireError, OSError)):
            bring_all(uncovered).answer()
    uncovered.states[uncovered.holder] = uncovered.begin(uncovered.holder)
    wanted = {"shard", "tail"} if sealed == 3 else {"shard"}
    assert uncovered.held_parts() == (wanted, wanted)
