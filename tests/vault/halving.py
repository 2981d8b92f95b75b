"""An owner's vault and its buddy's in one process, real sockets between them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from deadpool_megatron.events import Event
from deadpool_megatron.layout.bases import (
    MASTERS_PART,
    Masters,
    base_part,
    local_parts,
    pack_masters,
)
from deadpool_megatron.layout.records import (
    EpochRecord,
    Generation,
    NodeAddress,
    PartInfo,
    Restore,
    RoleLayout,
    Seat,
    extras_part,
)
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault.chain import Chain
from deadpool_megatron.vault.compaction import Halves, Words
from deadpool_megatron.vault.segment import Segment, checksum, own_name
from deadpool_megatron.vault.serving import Server
from deadpool_megatron.vault.shipping import Shipper
from deadpool_megatron.vault.state import VaultState
from deadpool_megatron.vault.transport import FakeNetwork
from tests.vault.harness import wait_until

EPOCH = 1
Bytes = bytes | bytearray
RECORD = EpochRecord(
    epoch=EPOCH,
    seats={role: Seat(role, 0, 0) for role in (0, 1)},
    nodes={n: NodeAddress("fake", n, f"rack{n}") for n in (0, 1)},
    restore=Restore("initial", Generation(EPOCH, 0)),
    replicas=1,
)


def rounded(masters: Words) -> Halves:
    """The bit patterns that a cast to bfloat16 gives: round to nearest even, NaN becomes 0x7fc0."""
    high = masters >> 16
    up = (masters + (np.uint32(0x7FFF) + (high & np.uint32(1)))) >> 16
    nan = (masters & np.uint32(0x7FFF_FFFF)) > np.uint32(0x7F80_0000)
    return np.where(nan, np.uint32(0x7FC0), up).astype(np.uint16)


@dataclass(frozen=True)
class Shape:
    """How a shard part of ``nbytes`` is laid out; the base has the weights in another order."""

    masters: Masters
    nbytes: int

    @staticmethod
    def of(values: int) -> Shape:
        """A third of the values are of one parameter, the others of another; moments lie between
        the masters, and a count of steps behind them."""
        first = values // 3
        runs = ((64, first, 2 * (values - first)), (64 + 12 * first, values - first, 0))
        return Shape(Masters(runs), 64 + 12 * values + 32)

    def shard(self, iteration: int) -> bytearray:
        """The owner's part: masters as trained ones are, with a tie that went down and a NaN."""
        random = np.random.default_rng(iteration)
        part = bytearray(random.bytes(self.nbytes))
        for offset, count, _ in self.masters.runs:
            values = random.standard_normal(count).astype(np.float32).view(np.uint32)
            values ^= random.integers(0, 1 << 16, count, dtype=np.uint32)
            values[:2] = 0x3F82_8000, 0x7FC0_0001
            part[offset : offset + 4 * count] = values.tobytes()
        return part

    def weights(self, part: Bytes) -> bytearray:
        """What a peer has of it after the gather."""
        base = bytearray(self.masters.base_bytes)
        for offset, count, at in self.masters.runs:
            halves = rounded(np.frombuffer(part, np.uint32, count, offset))
            base[at : at + 2 * count] = halves.tobytes()
        return base


class Node:
    """A vault and its one member, role ``number``."""

    def __init__(
        self, number: int, directory: Path, network: FakeNetwork, shape: Shape, compaction: str
    ) -> None:
        directory.mkdir()
        self.events: list[Event] = []
        settings = Settings(compaction=compaction, connect_seconds=20.0)
        self.state = VaultState(number, directory, settings, self.events.append)
        self.state.adopt(RECORD)
        self.seat = RECORD.seats[number]
        own = (number,)
        self.layout = RoleLayout(
            role=number,
            parts=(
                PartInfo("shard", shape.nbytes, own),
                PartInfo(extras_part("step"), 100, own),
                *local_parts(number, 1, shape.masters.base_bytes, 200),
            ),
            peers=(0, 1),
            slots=2,
            layout_hash="hash",
        )
        self.transport = network.transport("fake", number, 20.0)

    def make_slots(self) -> None:
        """As the member does when it registers."""
        path = self.state.table.directory / own_name(self.layout.role, self.seat)
        Segment.create(path, self.layout, self.seat, [part.name for part in self.layout.parts])
        self.state.attach(path.name)

    def seal(self, iteration: int, parts: dict[str, Bytes], damaged: str = "") -> None:
        """As the member and its worker do; a byte of part ``damaged`` is lost in between."""
        segment = self.state.table.own(self.layout.role, self.seat)
        assert segment is not None
        slot, generation = iteration % 2, Generation(EPOCH, iteration)
        segment.mark_writing(slot)
        segment.begin(slot, generation, EPOCH)
        for name, content in parts.items():
            segment.data(slot, name, len(content))[:] = content
        segment.fill(slot, {name: len(content) for name, content in parts.items()}, EPOCH)
        views = {name: segment.data(slot, name, len(content)) for name, content in parts.items()}
        digests = {name: checksum(view) for name, view in views.items()}
        if damaged:
            views[damaged][100] ^= 1
        assert self.state.seal_own(segment, slot, generation, EPOCH, digests)


class Pair:
    """Role 0 on node 0 ships to node 1, whose member keeps its weights."""

    def __init__(self, directory: Path, shape: Shape, compaction: str = "on") -> None:
        network = FakeNetwork()
        self.shape = shape
        self.owner, self.buddy = (
            Node(n, directory / f"node{n}", network, shape, compaction) for n in (0, 1)
        )
        self.owner.make_slots()
        self.buddy.make_slots()
        self.server = Server(self.buddy.state, self.buddy.transport)
        self.server.start()
        self.shipper = Shipper(
            self.owner.state, self.owner.transport, self.owner.layout, 1, EPOCH, Chain((1,))
        )
        self.shipper.start()

    def own(self, iteration: int, part: Bytes | None = None, damaged: str = "") -> None:
        """The owner seals a generation."""
        masters = {MASTERS_PART: pack_masters({"shard": self.shape.masters})}
        content = {"shard": part or self.shape.shard(iteration), extras_part("step"): b"extras"}
        self.owner.seal(iteration, {**content, **masters}, damaged)

    def keep(self, iteration: int, base: Bytes | None = None) -> None:
        """The peer seals its own generation, with the owner's weights."""
        kept = base or self.shape.weights(self.shape.shard(iteration))
        self.buddy.seal(iteration, {base_part(0): kept})

    def wait(self, iteration: int) -> None:
        """Until the owner's generation is committed."""
        committed, wanted = self.owner.state.committed, Generation(EPOCH, iteration)
        wait_until(lambda: 0 in committed and committed[0][0] == wanted, f"{wanted} is committed")

    def check(self, iteration: int, part: Bytes | None = None) -> None:
        """The buddy's copy is the owner's part, sealed with its checksum."""
        self.wait(iteration)
        (place,) = self.buddy.state.table.find(0, Generation(EPOCH, iteration), "shard")
        assert bytes(place.view) == bytes(part or self.shape.shard(iteration))
        assert place.checksum == checksum(place.view)

    @property
    def shipped(self) -> int:
        """Bytes that the owner has sent."""
        return self.owner.state.counters["bytes shipped"]

    @property
    def as_halves(self) -> int:
        """Parts that have arrived as halves."""
        return self.owner.state.counters["parts sent as halves"]

    def given_up(self) -> dict[str, int]:
        """Why parts could not be put together."""
        found = self.buddy.state.counters
        return {name: count for name, count in found.items() if name.startswith("halves")}

    def stop(self) -> None:
        """End everything."""
        for node in (self.owner, self.buddy):
            node.state.close(EPOCH)
        self.server._stopping.set()
        self.owner.transport.connect("fake", 1).close()  # wakes who accepts
        self.server.stop()
        self.shipper.cut()
        self.shipper.join(5.0)
        assert not self.shipper.is_alive()
