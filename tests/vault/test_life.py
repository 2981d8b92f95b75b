"""The whole life of a run's vaults under each plan, line by line: what members are answered, what
agents hear, and what each node holds in the end of every epoch.

Expected are the files in lives/. A change that is meant changes them as well: with
``DEADPOOL_TEST_WRITE=1`` in the environment these tests write them again, and the difference is
read like that of any other file.
"""

import asyncio
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from deadpool_megatron.events import Event, Kind
from deadpool_megatron.layout import planner, records, schemes
from deadpool_megatron.layout.history import NO_LIMIT
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault import errors, slot_memory
from deadpool_megatron.vault.control import VaultControl
from deadpool_megatron.vault.shm.segment import own_name
from deadpool_megatron.wire.framing import WireError
from tests.common import lives
from tests.common.wait import MAX_WAIT_SECONDS, wait_for
from tests.vault.fake_network import FakeNetwork
from tests.vault.harness import Loop, Member, make_layout
from tests.vault.local_node import LocalNode
from tests.vault.protected import flip

LIVES = Path(__file__).parent / "lives"
SETTINGS = Settings(connect_seconds=5.0, restore_seconds=5.0, chunk_bytes=4096)
# What differs from one time to the next.
_VOLATILE = re.compile(r"seconds|per_second|speed|link|origin|^(pid|t|started|fit|limit_bytes)$")
_BOUNDARIES = ("step", "evaluation", "save")
# Events that come or not by the time that something takes; refusals are counted as well.
_AS_TIME_GOES = (Kind.EXPOSED, Kind.REFUSED)
# What a message of another vault may have in place of what is right.
_CHANGES: tuple[dict[str, Any], ...] = (
    *({"epoch": epoch} for epoch in (1, 3)),
    *({"role": role} for role in (2, 9)),
    *({"generation": other} for other in ([2, 5], [1, 4], [1, 6], [2, -1], [2, 1 << 63], [2])),
    *({"part": part} for part in ("shard", "extras@save", "none", None)),
    *({"node": 1}, {"layout_hash": "other"}, {"t": "other"}),
    *({"parts": [part]} for part in (["shard", -1, 5], ["tail", 1001, 5], ["none", 0, 5], 5)),
    *({"elsewhere": [part]} for part in (["tail", 1001, 5], ["extras@step", 0, 5])),
)


class Life:
    """Three roles on nodes 0 to 2, and a spare node; ``lines``: what was seen."""

    def __init__(self, directory: Path, kind: str) -> None:
        self.directory, self.lines = directory, list[str]()
        self.plan = schemes.plan_of_kind(kind, 1, 3)
        self.network, self.loop = FakeNetwork(), Loop()
        self.events: dict[int, list[Event]] = {}
        self.controls: dict[int, VaultControl] = {}
        self.nodes: dict[int, LocalNode] = {}
        self.members: dict[int, Member] = {}
        self.layouts = {r: make_layout(r, nbytes=9000 - 1500 * r) for r in range(3)}
        self.seats = {role: records.Seat(role, 0, 0) for role in range(3)}
        self.kept: dict[int, int] = {}
        self.bad: frozenset[records.BadPart] = frozenset()
        for number in range(4):
            place = directory / "deadpool-life" / f"node{number}"
            self.nodes[number] = LocalNode(self.network, number, place, SETTINGS)
            self.connect(number)

    def connect(self, number: int) -> None:
        """The agent of a node finds its vault."""
        events = self.events.setdefault(number, [])
        path = self.nodes[number].socket_path
        self.controls[number] = self.loop(VaultControl.connect(path, events.append, 5.0))

    def note(self, what: str, value: Any) -> None:
        text = lives.text(value, _VOLATILE).replace(str(self.directory), "DIR")
        self.lines.append(f"{what}: {text}")

    def refused(self, what: str, act: Callable[[], Any]) -> None:
        """Write down how something is refused."""
        with pytest.raises((errors.VaultError, OSError)) as found:
            act()
        self.note(what, f"{type(found.value).__name__}: {found.value}")

    def open(self, epoch: int, restore: records.Restore | None = None) -> records.EpochRecord:
        """All nodes adopt the record of an epoch, and its members register."""
        used = {seat.node for seat in self.seats.values()}
        record = records.EpochRecord(
            epoch,
            self.seats,
            {n: records.NodeAddress("fake", n, f"d{n}", n not in used) for n in self.nodes},
            restore or records.Restore("initial", records.Generation(epoch, 0)),
            protection=self.plan,
        )
        for control in self.controls.values():
            self.loop(control.adopt(record, 5.0))
        for role, seat in self.seats.items():
            known = self.members.get(role)
            if (
                known is None
                or known.seat != seat
                or known.client not in self.nodes[seat.node].clients
            ):
                node = self.nodes[seat.node]
                known = Member(node, self.layouts[role], None, seat.incarnation)
                known.seat = seat
                self.members[role] = known
            known.client.register(self.layouts[role], epoch)
        return record

    def train(self, epoch: int, *iterations: int, evaluates: int = -1) -> None:
        """In lock step, each generation committed before the next."""
        for iteration in iterations:
            generation = records.Generation(epoch, iteration)
            for member in self.members.values():
                names = [part.name for part in member.layout.parts if "@" not in part.name]
                member.fill(generation, epoch, [*names, "extras@step"])
            self.committed(generation, "step")
            for boundary in _BOUNDARIES[1:] if iteration == evaluates else ():
                for member in self.members.values():
                    member.append(generation, boundary)
                self.committed(generation, boundary)

    def committed(self, generation: records.Generation, boundary: str) -> None:
        """Wait until members know of the commit, and then their agents."""
        for role, member in self.members.items():
            assert member.wait(generation, boundary) == "committed", (role, generation, boundary)
            self.await_commit(member.seat.node, generation.iteration, boundary)

    def await_commit(self, number: int, iteration: int, boundary: str) -> None:
        """Wait until an agent hears of a commit, after its member has."""

        def there() -> bool:
            found = [(e.iteration, e.data.get("boundary")) for e in [*self.events[number]]]
            return (iteration, boundary) in found

        wait_for(f"{iteration} at {boundary} on node {number}", there, MAX_WAIT_SECONDS)

    def close(self, epoch: int) -> dict[int, records.Inventory]:
        """The end of an epoch: the reports to agents, and the holdings of nodes."""
        found = {}
        for number, control in self.controls.items():
            slot_memory.remove_unneeded(self.nodes[number].vault.store)
            self.loop(control.close_epoch(epoch, 5.0))
            found[number] = self.loop(control.inventory(5.0))
            events = [e for e in self.events[number] if e.kind not in _AS_TIME_GOES]
            for text in sorted(lives.text(e.to_dict(), _VOLATILE) for e in events):
                self.lines.append(f"node {number} event {text}".replace(str(self.directory), "DIR"))
            self.events[number].clear()
            self.note(f"node {number} status", self.loop(control.status(5.0)))
            self.note(f"node {number} inventory", found[number].to_dict())
        return found

    def restore(
        self, epoch: int, inventories: dict[int, records.Inventory], seats: dict[int, records.Seat]
    ) -> records.EpochRecord:
        """Open an epoch with what the coordinator would choose; all restore."""
        query = planner.RestoreQuery(
            epoch, range(3), inventories, seats, self.seats, self.kept, bad_parts=self.bad
        )
        restore = planner.choose_restore(query)
        assert isinstance(restore, records.Restore), restore
        self.note("restore", restore.to_dict())
        self.seats = seats
        record = self.open(epoch, restore)
        self.restored(record)
        return record

    def restored(self, record: records.EpochRecord) -> None:
        for role, member in self.members.items():
            try:
                parts = member.restore(record)
            except errors.VaultError as error:
                self.note(f"role {role} has not restored", str(error))
                return
            sums = {name: (len(parts.part(name)), crc32(parts.part(name))) for name in parts.names}
            self.note(f"role {role} restored", sums)
            parts.close()
        self.committed(record.restore.generation, record.restore.boundary)

    def ask(self, number: int, what: str, message: dict[str, Any]) -> None:
        """What another vault is answered."""
        channel = self.network.transport("fake", 9, 5.0).connect(number, "fake", number)
        try:
            channel.send({"t": "offer", "layout": self.layouts[0].to_dict()})
            channel.send(message)
            answer = channel.receive()
            if answer["t"] == "part":
                channel.receive_bulk(memoryview(bytearray(answer["nbytes"])), lambda _: None)
            answer = {"answer": answer.pop("t"), **answer}
        except (OSError, WireError) as error:
            answer = type(error).__name__
        self.note(f"{what} at node {number}", answer)
        channel.close()

    def visit(self, number: int, epoch: int, iteration: int) -> None:
        """Another vault says what it might, and what it must not, to one that has a copy."""
        held = self.loop(self.controls[number].status(5.0))["holdings"]
        known = {(one["role"], tuple(one["generation"])) for one in held}
        generation = [epoch, iteration]
        about = {"epoch": epoch, "role": 0, "generation": generation}
        fetch = {**about, "t": "fetch", "part": "extras@step"}
        hashed = {"layout_hash": self.layouts[0].layout_hash}
        put = {**about, **hashed, "t": "put", "node": 0, "parts": [], "elsewhere": []}
        describe = {"t": "describe", "role": 0, "generation": generation}
        self.note(f"node {number} has it", (0, tuple(generation)) in known)
        for message in (fetch, put, describe):
            self.ask(number, str(message["t"]), message)
            for change in _CHANGES:
                if change.keys() <= message.keys():
                    self.ask(number, f"{message['t']} with {change}", message | change)

    def stop(self) -> None:
        for control in self.controls.values():
            self.loop(control.close())
        for node in self.nodes.values():
            node.stop()
        self.loop.stop()


@pytest.fixture
def live(tmp_path):
    lives: list[Life] = []

    def begin(kind: str) -> Life:
        lives.append(Life(tmp_path, kind))
        return lives[-1]

    yield begin
    for life in lives:
        life.stop()


@pytest.mark.parametrize("kind", ["buddy", "parity"])
def test_a_life_is_as_it_was_before(live, kind, tmp_path):
    """A node is lost, a generation is set aside, a vault ends, a dump is restored, a byte flips."""
    life = live(kind)
    first = life.open(1)
    life.kept = {1: NO_LIMIT}
    life.train(1, 0, 1, 2, 3, evaluates=2)
    inventories = life.close(1)
    control, member = life.controls[0], life.members[0]
    life.refused("closed", lambda: life.loop(control.adopt(first, 5.0)))
    life.refused("frozen", lambda: member.write(records.Generation(1, 4)))
    life.loop(life.controls.pop(1).close())
    life.nodes.pop(1).die()
    del inventories[1]
    life.restore(2, inventories, {**life.seats, 1: records.Seat(3, 0, 0)})
    life.train(2, 4)
    taking = asyncio.run_coroutine_threadsafe(control.take("aside", 5, 5.0), life.loop.loop)
    life.train(2, 5, 6, evaluates=5)
    life.note("set aside", [replace(one, path="").to_dict() for one in taking.result(10)])
    for number in (2, 3):
        life.visit(number, 2, 6)
    inventories = life.close(2)
    dumped = tmp_path / "dump"
    asked = dumped, records.Generation(2, 6)
    for number, control in life.controls.items():
        life.note(f"node {number} dumped", life.loop(control.dump(*asked, "step", 5.0)))
    (tmp_path / "taken").touch()
    life.refused(
        "taken", lambda: life.loop(control.dump(tmp_path / "taken", asked[1], "save", 5.0))
    )
    sizes = {path.name: path.stat().st_size for path in dumped.rglob("*") if path.is_file()}
    life.note("files", sizes)
    life.loop(life.controls[0].close())
    life.nodes[0].stop()
    life.nodes[0].start()
    life.connect(0)
    life.members.pop(0)
    life.kept = {1: 3, 2: NO_LIMIT}
    record = life.open(3, records.Restore("dump", records.Generation(2, 6), "step", str(dumped)))
    life.restored(record)
    life.train(3, 7)
    inventories = life.close(3)
    flip(life.nodes[0], own_name(0, life.seats[0]), records.Generation(3, 7), "shard")
    life.kept[3] = NO_LIMIT
    life.restore(4, inventories, life.seats)
    inventories = life.close(4)
    life.kept[4] = NO_LIMIT
    life.bad = frozenset({records.BadPart(0, 0, records.Generation(3, 7), "shard")})
    life.restore(5, inventories, life.seats)
    life.train(5, 8)
    life.close(5)
    for number, control in life.controls.items():
        life.loop(control.shutdown(number != 3, 5.0))
        life.nodes[number].end.join(10)
    life.note("left", sorted(str(path) for path in (tmp_path / "deadpool-life").rglob("*")))
    lives.hold(LIVES / f"{kind}.txt", life.lines)
