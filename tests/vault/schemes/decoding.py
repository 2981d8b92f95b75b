"""Vaults that hold a coded group, of which roles are lost: what is decided then."""

from pathlib import Path

from deadpool_megatron.events import Event, Kind
from deadpool_megatron.layout import history, parity_groups, planner
from deadpool_megatron.layout.records import EpochRecord, Inventory, Restore, Seat
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault.peer_server import Server
from deadpool_megatron.vault.restore import Restorer
from deadpool_megatron.vault.shm.segment import copy_name, own_name
from tests.vault.fake_network import FakeNetwork
from tests.vault.harness import record_of
from tests.vault.schemes.coded import EXTRAS, GENERATION, CodedGroup, seal
from tests.vault.slots import SlotStore, scheme_of

SETTINGS = Settings(connect_seconds=5.0, restore_seconds=1.0, chunk_bytes=16 << 10)


class Vaults:
    """The vaults of a group and of one spare, without processes, on a network in this process."""

    def __init__(self, directory: Path, coded: CodedGroup, lost: set[int]) -> None:
        self.coded = coded
        self.lost = lost
        self.spare = coded.data + coded.parities
        self.network = FakeNetwork()
        self.nodes = [node for node in range(self.spare + 1) if node not in lost]
        self.directories = {node: directory / f"node{node}" for node in self.nodes}
        for path in self.directories.values():
            path.mkdir()
        coded.write(self.directories, lost)
        self.events: list[Event] = []
        self.states: dict[int, SlotStore] = {}
        self.servers: list[Server] = []

    def own(self, role: int) -> Path:
        """File of a role's own slots."""
        return self.directories[role] / own_name(role, Seat(role, 0, 0))

    def block(self, j: int) -> Path:
        """File of a parity block."""
        return self.directories[self.coded.holders[j]] / copy_name(self.coded.group.blocks[j])

    def open(self, chosen: Settings = SETTINGS) -> None:
        """Start all vaults and have them close epoch 1."""
        for node in self.nodes:
            transport = self.network.transport("fake", node, chosen.connect_seconds)
            about = self.directories[node], chosen, self.events.append, transport
            state = SlotStore(scheme_of, node, *about)
            state.table.scan()
            state.close(1)
            self.states[node] = state
            self.servers.append(Server(state, transport))
            self.servers[-1].start()

    def adopt(self, restore: Restore | None = None) -> EpochRecord:
        """Open epoch 2, in which the spare has the lost roles."""
        seats = seats_of(self.coded, self.lost, self.spare)
        if restore is None:
            inventories = {node: state.inventory() for node, state in self.states.items()}
            restore = plan(inventories, seats, self.coded.data)
        record = record_of(2, self.nodes, self.spare + 1, seats=seats, restore=restore)
        for state in self.states.values():
            state.adopt(record)
        return record

    def opened(self, chosen: Settings = SETTINGS) -> EpochRecord:
        """The vaults are started, and epoch 2 is open with what the coordinator decides."""
        self.open(chosen)
        return self.adopt()

    def put_block(self, members: parity_groups.BlockInputs | None = None, **parts: bytes) -> None:
        """Put a block in the place of parity block 0 that differs from it in this."""
        coded, (number, *_) = self.coded, self.coded.group.blocks
        right = {name: coded.parity(0, name) for name in ("shard", "tail")}
        told = {parity_groups.INPUTS: (members or coded.members(0)).encode()}
        seal(self.block(0), coded.layouts[number], None, right | parts | told)

    def obtain(self, record: EpochRecord, role: int) -> None:
        """Restore a lost role on the spare, and compare every byte."""
        state = self.states[self.spare]
        obtainer = Restorer(state, record, role)
        places = obtainer.obtain(self.coded.layouts[role])
        assert set(places) == {"shard", "tail", EXTRAS}
        for name, place in places.items():
            assert bytes(place.view) == self.coded.part(role, name), name
        held = {h.role: h.parts for h in state.table.holdings() if h.generation == GENERATION}
        assert held[role] == {"shard", "tail", EXTRAS}

    def decoded(self, part: str = "shard") -> list[list[int]]:
        """Numbers of the blocks of each decoding."""
        found = [event for event in self.events if event.kind is Kind.DECODED]
        return [sorted(map(int, e.data["blocks"])) for e in found if e.data["part"] == part]

    def corruptions(self) -> list[Event]:
        return [event for event in self.events if event.kind is Kind.CORRUPTION]

    def stop(self) -> None:
        for server in self.servers:
            server.stop()
        for state in self.states.values():
            state.gate.lanes.lanes[0].transport.close()


def seats_of(coded: CodedGroup, lost: set[int], spare: int) -> dict[int, Seat]:
    return {
        role: Seat(spare, sorted(lost).index(role), 0) if role in lost else Seat(role, 0, 0)
        for role in coded.group.roles
    }


def plan(inventories: dict[int, Inventory], seats: dict[int, Seat], roles: int) -> Restore:
    """What the coordinator would decide."""
    restore = planner.choose_restore(
        planner.RestoreQuery(2, range(roles), inventories, seats, seats, {1: history.NO_LIMIT})
    )
    assert not isinstance(restore, planner.NoRestore), restore
    return restore
