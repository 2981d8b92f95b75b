"""Rules 2, 3, 4 and 7 for every scheme: random seats, losses, restarts and damaged bytes.

Whole vaults with real slots and real members' clients, on a network in this process; what the
coordinator does is done by its own planner. A member's bytes follow from role, generation and part,
so that every restored byte is compared. What is left out here has tests of its own: real processes
and kills (test_faults, tests/faults).
"""

import itertools
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import event, given, settings, strategies as st

from deadpool_megatron.layout import history, placement, records
from deadpool_megatron.layout.planner import NoRestore, RestoreQuery, choose_restore
from deadpool_megatron.layout.records import EpochRecord, Generation, Inventory, Restore, Seat
from deadpool_megatron.layout.schemes import ProtectionPlan, SchemeKind, SchemeNumbers
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault.errors import RestoreUnavailable, VaultError
from deadpool_megatron.vault.shm.segment import PartState, Segment
from tests.vault.fake_network import FakeNetwork
from tests.vault.harness import Member, content, make_layout, record_of
from tests.vault.local_node import LocalNode

pytestmark = pytest.mark.slow

SHARDS = ("shard", "tail")
SEATED, SPARES = 4, 2
SETTINGS = Settings(connect_seconds=5.0, restore_seconds=60.0, chunk_bytes=4096)


# Name -> (plan, how many lost nodes it survives).
SCHEMES = {
    "buddy": (ProtectionPlan(), 1),
    "two buddies": (ProtectionPlan(), 2),
    "parity": (ProtectionPlan(SchemeNumbers(SchemeKind.PARITY, group=3)), 1),
    "two parities": (ProtectionPlan(SchemeNumbers(SchemeKind.PARITY, group=2)), 2),
    "local": (ProtectionPlan(SchemeNumbers(SchemeKind.LOCAL)), 0),
    "local twice": (ProtectionPlan(SchemeNumbers(SchemeKind.LOCAL_TWICE)), 0),
}


@pytest.fixture(autouse=True, scope="module")
def _one_process():
    """Threads of one process need no barrier between processes, which takes 10 ms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deadpool_megatron.vault.shm.table.fence", lambda: None)
        yield


def seals(node: LocalNode) -> list[tuple[Segment, int, str]]:
    """All sealed shard parts of a node in a fixed order."""
    found = []
    for path in sorted(node.directory.glob("*.seg")):
        segment = Segment.open(path)
        names = [part.name for part in segment.layout.parts if "extras" not in part.name]
        for slot, name in itertools.product(range(segment.layout.slots), names):
            entry = segment.entry(slot, name)
            if entry.state is PartState.SEALED and entry.nbytes:
                found.append((segment, slot, name))
    return found


class RoleMember(Member):
    """A member on any node, of any scheme."""

    def __init__(self, node: LocalNode, layout: records.RoleLayout, seat: Seat, epoch: int) -> None:
        super().__init__(node, layout, epoch, slot=seat.local_rank)

    def bytes_of(self, generation: Generation, name: str, nbytes: int) -> bytes:
        """What an iteration gives is the same in every lineage."""
        return content(self.role, Generation(1, generation.iteration), name, nbytes)

    def check(self, record: EpochRecord) -> None:
        """Restore and compare every byte."""
        parts = self.restore(record)
        for name in (*SHARDS, "extras@step"):
            view = parts.part(name)
            assert bytes(view) == self.bytes_of(record.restore.generation, name, len(view)), name
        parts.close()


@dataclass(frozen=True)
class Case:
    """``seats``: role -> node. ``torn``: how many roles get to write one generation more.
    ``restarted``: nodes whose vault process dies. ``damaged``: which of the sealed parts of which
    node get a wrong byte, counted round."""

    scheme: str
    seats: tuple[int, ...]
    sizes: tuple[int, ...]
    racks: tuple[int, ...]
    iterations: int
    torn: int
    lost: frozenset[int]
    restarted: frozenset[int]
    damaged: tuple[tuple[int, int], ...]


@st.composite
def cases(draw: st.DrawFn, damage: bool) -> Case:
    scheme = draw(st.sampled_from(sorted(SCHEMES)))
    survives = SCHEMES[scheme][1]
    count = draw(st.integers(SEATED, 2 * SEATED))
    others = draw(st.lists(st.integers(0, SEATED - 1), min_size=count, max_size=count))
    seats = draw(st.permutations([*range(SEATED), *others[SEATED:]]))
    most = SPARES if damage else survives
    every = [st.just(number) for number in range(SEATED + SPARES)]
    together = st.tuples(*(st.integers(0, 2) for _ in every))
    return Case(
        scheme,
        tuple(seats),
        tuple(draw(st.lists(st.integers(1, 9000), min_size=count, max_size=count))),
        draw(st.one_of(st.tuples(*every), together)),
        draw(st.integers(1, 5)),
        draw(st.integers(0, count)),
        frozenset(draw(st.sets(st.integers(0, SEATED - 1), max_size=most))),
        frozenset(draw(st.sets(st.integers(0, SEATED - 1), max_size=SEATED))),
        tuple(draw(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 99)), max_size=4)))
        if damage
        else (),
    )


class Nodes:
    """The nodes of a case, and what agents and the coordinator would do with them."""

    def __init__(self, case: Case, directory: Path) -> None:
        self.case = case
        self.plan, self.replicas = SCHEMES[case.scheme]
        self.network = FakeNetwork()
        self.live = {
            number: LocalNode(self.network, number, directory / f"node{number}", SETTINGS)
            for number in range(SEATED + SPARES)
        }
        roles = range(len(case.seats))
        self.layouts = {role: self._layout(role, case.sizes[role], tuple(roles)) for role in roles}
        self.seats = {role: Seat(node, role, 0) for role, node in enumerate(case.seats)}
        self.owners = self.seats
        self.kept = {1: history.NO_LIMIT}
        self.members: dict[int, RoleMember] = {}

    def _layout(self, role: int, nbytes: int, roles: tuple[int, ...]) -> records.RoleLayout:
        """Data-parallel groups of every other role, or of all where they are few."""
        peers = roles[role % 2 :: 2] if len(roles) >= 6 else roles
        return make_layout(role, nbytes, slots=2, peers=peers)

    def record(self, epoch: int, restore: Restore) -> EpochRecord:
        domains = {number: f"rack{self.case.racks[number]}" for number in self.live}
        used = {seat.node for seat in self.seats.values()}
        at = {role: seat.node for role, seat in self.seats.items()}
        return record_of(
            epoch,
            seats=self.seats,
            nodes={n: records.NodeAddress("fake", n, domains[n], n not in used) for n in self.live},
            restore=restore,
            replicas=self.replicas,
            fewer_copies=placement.missing_copies(
                at, domains, set(self.live) - used, self.replicas
            ),
            protection=self.plan,
        )

    def open(self, record: EpochRecord) -> None:
        for node in self.live.values():
            node.vault.adopt(record)

    def seat(self, epoch: int) -> None:
        """Members for all roles, where there is none yet."""
        for role, seat in self.seats.items():
            if role not in self.members:
                layout = self.layouts[role]
                self.members[role] = RoleMember(self.live[seat.node], layout, seat, epoch)

    def train(self, lineage: int, iterations: range) -> None:
        for iteration in iterations:
            for member in self.members.values():
                member.write(Generation(lineage, iteration))
            for member in self.members.values():
                assert member.wait(Generation(lineage, iteration)) == "committed"

    def lose(self, nodes: frozenset[int]) -> None:
        """These are gone; spares take their roles, else whoever lives."""
        for number in nodes:
            self.live.pop(number).die()
        places = itertools.cycle(sorted(set(self.live) - set(self.case.seats)))
        self.owners = self.seats
        self.seats = {
            role: Seat(next(places), role, 0) if seat.node in nodes else seat
            for role, seat in self.seats.items()
        }
        self._forget_members_of(nodes)

    def restart(self, nodes: frozenset[int]) -> None:
        """These vault processes die and others take over their slots."""
        for number in nodes & set(self.live):
            self.live[number].stop()
            self.live[number].start()
        self._forget_members_of(nodes)

    def _forget_members_of(self, nodes: frozenset[int]) -> None:
        """A member of a vault that was restarted is made anew: its client has the old path."""
        self.members = {r: m for r, m in self.members.items() if m.seat.node not in nodes}

    def close(self, epoch: int) -> dict[int, Inventory]:
        for node in self.live.values():
            node.vault.close_epoch(epoch)
        return self.inventories()

    def inventories(self) -> dict[int, Inventory]:
        return {n: node.vault.store.inventory() for n, node in self.live.items()}

    def choose(self, inventories: Mapping[int, Inventory], epoch: int) -> Restore | NoRestore:
        return choose_restore(
            RestoreQuery(
                epoch,
                self.seats,
                inventories,
                self.seats,
                self.owners,
                self.kept,
                layouts=self.layouts,
            )
        )

    def stop(self) -> None:
        for node in self.live.values():
            node.stop()


@contextmanager
def nodes_of(case: Case) -> Iterator[Nodes]:
    with tempfile.TemporaryDirectory() as directory:
        nodes = Nodes(case, Path(directory))
        try:
            nodes.open(nodes.record(1, Restore("initial", Generation(1, 0))))
            nodes.seat(1)
            yield nodes
        finally:
            nodes.stop()


def expect_any_loss_survived(nodes: Nodes, at_least: int, epoch: int) -> None:
    """Rule 2: whichever nodes are lost, as many as the scheme survives. Closes the epoch before."""
    inventories = nodes.close(epoch - 1)
    for lost in itertools.combinations(inventories, nodes.replicas):
        left = {n: one for n, one in inventories.items() if n not in lost}
        chosen = nodes.choose(left, epoch)
        assert isinstance(chosen, Restore), (lost, chosen)
        assert chosen.generation.iteration >= at_least, lost


def strike(nodes: Nodes) -> None:
    """Write one generation of which not all roles get theirs, close, restart, lose, damage."""
    case, newest = nodes.case, Generation(1, nodes.case.iterations)
    for role in range(case.torn):
        nodes.members[role].write(newest)
    expect_any_loss_survived(nodes, case.iterations - 1, 2)
    promised = nodes.inventories()
    for member in nodes.members.values():
        with pytest.raises(VaultError):
            member.write(Generation(1, newest.iteration + 1))
    assert nodes.inventories() == promised, "rule 3: what was promised stays as it is"
    nodes.restart(case.restarted)
    assert nodes.close(1) == promised, "rule 7: no process takes a sealed byte along"
    nodes.lose(case.lost)
    for which, number in case.damaged:
        node = sorted(nodes.live)[which % len(nodes.live)]
        if found := seals(nodes.live[node]):
            segment, slot, name = found[number % len(found)]
            segment.data(slot, name)[0] ^= 0x20


def recover(nodes: Nodes) -> EpochRecord | None:
    """As the coordinator does, epoch by epoch, until all roles have their state; None: never."""
    for epoch in range(2, 20):
        inventories = nodes.close(epoch - 1)
        restore = nodes.choose(inventories, epoch)
        if isinstance(restore, NoRestore):
            return None
        record = nodes.record(epoch, restore)
        nodes.open(record)
        nodes.seat(epoch)
        try:
            for member in nodes.members.values():
                member.check(record)
            for member in nodes.members.values():
                assert member.wait(restore.generation) == "committed"
        except (RestoreUnavailable, VaultError) as error:
            event(f"again: {type(error).__name__}")
            continue
        nodes.kept = {epoch: history.NO_LIMIT, 1: restore.generation.iteration}
        return record
    raise AssertionError("no end")


@settings(max_examples=settings().max_examples // 5)
@given(cases(damage=False))
def test_no_loss_that_a_scheme_survives_costs_a_committed_generation(case):
    """Rules 2, 3 and 7, and again after the recovery."""
    with nodes_of(case) as nodes:
        nodes.train(1, range(case.iterations))
        strike(nodes)
        record = recover(nodes)
        reached = record.restore.generation.iteration
        assert reached in (case.iterations - 1, case.iterations)
        assert reached == case.iterations - 1 or case.torn == len(case.seats)
        nodes.train(record.epoch, range(reached + 1, reached + 3))
        nodes.owners = nodes.seats
        if not record.fewer_copies:
            expect_any_loss_survived(nodes, reached + 2, record.epoch + 1)


@settings(max_examples=settings().max_examples // 5)
@given(cases(damage=True))
def test_damaged_bytes_are_never_restored(case):
    """Rule 4: another source, an older generation, or nothing."""
    with nodes_of(case) as nodes:
        nodes.train(1, range(case.iterations))
        strike(nodes)
        record = recover(nodes)
        event("nothing left" if record is None else "restored")
        if record is None:
            assert case.damaged or len(case.lost) > SCHEMES[case.scheme][1]


@settings(max_examples=settings().max_examples // 10)
@given(cases(damage=False), st.integers(0, 20))
def test_part_damaged_everywhere_costs_at_most_a_generation(case, which):
    """Rule 4: of one role every sealed byte of the newest generation is wrong, on every node."""
    case = replace(case, torn=0, iterations=max(2, case.iterations))
    with nodes_of(case) as nodes:
        nodes.train(1, range(case.iterations))
        strike(nodes)
        newest = Generation(1, case.iterations - 1)
        for node in nodes.live.values():
            for segment, slot, name in seals(node):
                one = segment.layout.role, segment.generation(slot)
                if one == (which % len(case.seats), newest):
                    segment.data(slot, name)[0] ^= 0x20
        record = recover(nodes)
        found = record.restore.generation.iteration
        assert found in (newest.iteration - 1, newest.iteration)
        event(f"{case.scheme}: {newest.iteration - found} older")
