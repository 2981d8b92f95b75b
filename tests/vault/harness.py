"""Real vault processes on loopback, driven like an agent drives them, and members in the test."""

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from deadpool_megatron.events import Event, Kind
from deadpool_megatron.layout import records
from deadpool_megatron.layout.records import Generation
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault.control import VaultControl
from deadpool_megatron.vault.shm.segment import Geometry
from deadpool_megatron.vault.vault_client import RestoredParts, VaultClient
from deadpool_megatron.wire import auth
from tests.common import forks
from tests.common.wait import wait_for
from tests.vault.local_node import LocalNode

T = TypeVar("T")
DEADLINE = 20.0
RUN_ID = "test-run"
# What a vault imports, for its process to be a fork of one that has: most tests here start some.
VAULT = ("deadpool_megatron.vault.agent_orders", "deadpool_megatron.vault.transport")


def segment_bytes(layout: records.RoleLayout) -> int:
    """Memory of an own segment with all its slots, headers included."""
    return Geometry(layout, None, layout.slots).nbytes


def enter(client: VaultClient, epoch: int) -> None:
    """A member's client without a vault enters an epoch."""
    client._enter(epoch)


def commit(client: VaultClient, generation: Generation) -> None:
    """The message of a vault arrives: a generation is committed after its step, in its epoch."""
    enter(client, generation.lineage)
    about = {"generation": generation.to_list(), "boundary": "step"}
    client._handle({"t": "committed", "epoch": generation.lineage, **about})


def make_layout(
    role: int,
    nbytes: int = 64 << 10,
    slots: int = 2,
    peers: tuple[int, ...] = (0, 1, 2),
    replicas: tuple[int, ...] | None = None,
) -> records.RoleLayout:
    """Two shard parts and the extras of every boundary."""
    own = (role,)
    return records.RoleLayout(
        role=role,
        parts=(
            records.PartInfo("shard", nbytes, replicas or own),
            records.PartInfo("tail", 1000, replicas or own),
            records.PartInfo("extras@step", 8192, own),
            records.PartInfo("extras@evaluation", 8192, own),
            records.PartInfo("extras@save", 8192, own),
        ),
        peers=peers,
        slots=slots,
        layout_hash=f"hash-{nbytes}",
    )


def content(role: int, generation: records.Generation, name: str, nbytes: int) -> bytes:
    """The bytes every test writes and expects."""
    seed = f"{role}/{generation.lineage}/{generation.iteration}/{name}"
    return random.Random(seed).randbytes(nbytes)


def wait_until(condition: Callable[[], T], what: str, seconds: float = DEADLINE) -> T:
    """Poll for something another process does."""
    return wait_for(what, condition, seconds)


class Loop:
    """An asyncio loop in a thread, as the agent has one."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def __call__(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(DEADLINE + 5)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(5)
        self.loop.close()


@dataclass
class Node:
    """One node: its sockets, its vault process, its agent's connection."""

    number: int
    run_dir: Path
    directory: Path
    settings: Settings
    loop: Loop
    faults: Path | None = None
    events: list[Event] = field(default_factory=list)
    clients: list[VaultClient] = field(default_factory=list)
    process: forks.Forked = field(init=False)
    control: VaultControl = field(init=False)

    def __post_init__(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self.tcp = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.address, self.port = self.tcp.getsockname()
        self.unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket_path = str(self.directory / "vault.sock")
        self.unix.bind(self.socket_path)
        self.unix.listen(64)

    def start(self) -> None:
        """Start the vault and connect to it."""
        environment = {
            **os.environ,
            "DEADPOOL_RUN_ID": RUN_ID,
            "DEADPOOL_SETTINGS": self.settings.to_json(),
        }
        if self.faults is not None:
            environment["DEADPOOL_FAULTS"] = str(self.faults)
        sockets = {handle: handle for handle in (self.unix.fileno(), self.tcp.fileno())}
        with (
            open(self.run_dir / f"vault{self.number}.log", "ab") as log,
            open(os.devnull, "rb") as nothing,
        ):
            self.process = forks.server(VAULT).start(
                "deadpool_megatron.vault",
                *("--run-dir", str(self.run_dir), "--node", str(self.number)),
                *("--segment-dir", str(self.directory)),
                *("--unix-fd", str(self.unix.fileno()), "--tcp-fd", str(self.tcp.fileno())),
                environment=environment,
                handles={0: nothing.fileno(), 1: log.fileno(), 2: log.fileno(), **sockets},
            )
        self.control = self.loop(
            VaultControl.connect(self.socket_path, self.events.append, DEADLINE)
        )

    def client(self, seat: records.Seat) -> VaultClient:
        """The connection of a member."""
        made = VaultClient(self.socket_path, self.directory, seat, connect_seconds=DEADLINE)
        self.clients.append(made)
        return made

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """SIGKILL, as a real failure; the sockets stay with the agent."""
        self.process.kill()
        self.process.wait(10)

    def await_killed(self) -> None:
        """Until a fault has ended the vault."""
        assert self.process.wait(DEADLINE) == -signal.SIGKILL

    def restart(self, record: records.EpochRecord) -> None:
        """Another vault takes over the slots in the epoch of this record."""
        self.start()
        self.adopt(record)

    def die(self) -> None:
        """The whole node is gone: vault, agent with its sockets, members."""
        self.kill()
        self.tcp.close()
        self.unix.close()
        for client in self.clients:
            client.close()
        shutil.rmtree(self.directory)

    def adopt(self, record: records.EpochRecord) -> None:
        self.loop(self.control.adopt(record, DEADLINE))

    def close_epoch(self, epoch: int) -> None:
        self.loop(self.control.close_epoch(epoch, DEADLINE))

    def inventory(self) -> records.Inventory:
        return self.loop(self.control.inventory(DEADLINE))

    def status(self) -> dict[str, Any]:
        return self.loop(self.control.status(DEADLINE))

    def dump(
        self, directory: Path, generation: records.Generation, boundary: str
    ) -> dict[str, Any]:
        """Return the vault's answer to the order to dump."""
        return self.loop(self.control.dump(directory, generation, boundary, DEADLINE))

    def shutdown(self, remove: bool) -> None:
        self.loop(self.control.shutdown(remove, DEADLINE))
        self.process.wait(10)

    def count(self, text: str) -> int:
        """Refusals or other counters whose name contains ``text``."""
        counters = self.status()["counters"]
        return sum(value for name, value in counters.items() if text in name)

    def seen(self, kind: Kind, **data: object) -> list[Event]:
        return [
            event
            for event in list(self.events)
            if event.kind is kind and all(event.data.get(k) == v for k, v in data.items())
        ]

    def told(self, kind: Kind, **data: object) -> list[Event]:
        """:meth:`seen`, once there is one: a member hears of a commit, and who has put something is
        refused, before the agent hears of the event."""
        return wait_until(lambda: self.seen(kind, **data), f"an event {kind} of node {self.number}")

    def log(self) -> str:
        return (self.run_dir / f"vault{self.number}.log").read_text()


class GateShutError(Exception):
    """The test has waited long enough."""


class Member:
    """A member's use of its vault: what the trainer does around one iteration. With an ``epoch`` it
    has registered in it."""

    def __init__(
        self,
        node: Node | LocalNode,
        layout: records.RoleLayout,
        epoch: int | None = None,
        incarnation: int = 0,
        slot: int = 0,
    ) -> None:
        self.layout = layout
        self.role = layout.role
        self.seat = records.Seat(node.number, slot, incarnation)
        self.client = node.client(self.seat)
        self.interrupt = os.eventfd(0, os.EFD_CLOEXEC)
        self.waits: list[float] = []
        if epoch is not None:
            self.client.register(layout, epoch)

    def write(self, generation: records.Generation, extras: bool = True) -> None:
        names = [*self.layout.shard_parts, *(["extras@step"] if extras else [])]
        self.fill(generation, generation.lineage, names)

    def fill(
        self, generation: records.Generation, epoch: int, names: Iterable[str], wrong: str = ""
    ) -> None:
        """Fill parts of a slot with the expected bytes of a generation, one of them wrong perhaps.
        Those that have room to spare are shorter than it."""
        writer = self.client.begin(generation, epoch)
        sizes = {}
        for name in names:
            target = writer.part(name)
            sizes[name] = 777 if name == "extras@step" else len(target)
            target[: sizes[name]] = self.bytes_of(generation, name, sizes[name])
            target[0] ^= name == wrong
        writer.fill(sizes)

    def bytes_of(self, generation: records.Generation, name: str, nbytes: int) -> bytes:
        return content(self.role, generation, name, nbytes)

    def append(self, generation: records.Generation, boundary: str) -> None:
        name = records.extras_part(boundary)
        self.client.append(generation, name, content(self.role, generation, name, 555))

    def wait(
        self, generation: records.Generation, boundary: str = "step", seconds: float = DEADLINE
    ) -> str:
        """The gate; ``shut`` when it did not open in ``seconds``."""

        def report(waited: float) -> None:
            self.waits.append(waited)
            if waited >= seconds:
                raise GateShutError

        try:
            is_committed = self.client.wait_committed(
                generation,
                boundary,
                interrupted=self.interrupt,
                on_wait=report,
                report_every_seconds=0.2,
            )
            return "committed" if is_committed else "interrupted"
        except GateShutError:
            return "shut"

    def step(self, generation: records.Generation) -> None:
        """One iteration: fill, and wait at the gate of the next."""
        self.write(generation)
        assert self.wait(generation) == "committed"

    def restore(self, record: records.EpochRecord) -> RestoredParts:
        return self.client.restore(
            self.layout,
            record.epoch,
            record.restore.generation,
            record.restore.boundary,
            deadline_seconds=DEADLINE,
            interrupted=self.interrupt,
        )

    def check(
        self, record: records.EpochRecord, written_as: records.Generation | None = None
    ) -> None:
        """Restore and compare every byte."""
        parts = self.restore(record)
        generation = written_as or record.restore.generation
        assert set(parts.names) == {
            *self.layout.shard_parts,
            records.extras_part(record.restore.boundary),
        }
        for name in parts.names:
            view = parts.part(name)
            assert view.readonly
            assert bytes(view) == self.bytes_of(generation, name, len(view)), name
        parts.close()


def train(members: Iterable[Member], *generations: records.Generation) -> None:
    """In lock step: all write a generation, and wait at the gate of the next iteration."""
    for generation in generations:
        for member in members:
            member.write(generation)
        for member in members:
            assert member.wait(generation) == "committed"


class Cluster:
    """Nodes 0..n-1 with one role each on the first ``roles`` of them; the others are spares."""

    def __init__(
        self,
        directory: Path,
        nodes: int,
        roles: int | None = None,
        faults: list[dict[str, Any]] | None = None,
        segment_dir: Callable[[int], Path] | None = None,
        kind: Callable[..., Node] = Node,
        **settings: Any,
    ) -> None:
        self.directory = directory
        self.loop = Loop()
        self.roles = nodes if roles is None else roles
        auth.create_secret(directory)
        plan = None
        if faults is not None:
            plan = directory / "faults.json"
            plan.write_text(json.dumps(faults))
        self.shm = Path("/dev/shm") / f"deadpool-test-{os.getpid()}-{directory.name}"
        chosen = Settings(**{"connect_seconds": 10.0, **settings})
        self.nodes = [
            kind(
                number=i,
                run_dir=directory,
                directory=segment_dir(i) if segment_dir else self.shm / f"node{i}",
                settings=chosen,
                loop=self.loop,
                faults=plan,
            )
            for i in range(nodes)
        ]
        (directory / "nodes").mkdir(exist_ok=True)

    def start(self) -> None:
        for node in self.nodes:
            node.start()

    def stop(self) -> None:
        for node in self.nodes:
            for client in node.clients:
                client.close()
            if hasattr(node, "control"):
                with contextlib.suppress(OSError):
                    self.loop(node.control.close())
            if hasattr(node, "process") and node.process.poll() is None:
                node.kill()
            node.tcp.close()
            node.unix.close()
        self.loop.stop()
        shutil.rmtree(self.shm, ignore_errors=True)
        for node in self.nodes:
            if (self.directory / f"vault{node.number}.log").exists():
                assert "Traceback" not in node.log()

    def record(
        self,
        epoch: int,
        restore: records.Restore | None = None,
        seats: Mapping[int, records.Seat] | None = None,
        gone: Collection[int] = (),
        **more: Any,
    ) -> records.EpochRecord:
        seats = seats or {role: records.Seat(role, 0, 0) for role in range(self.roles)}
        used = {seat.node for seat in seats.values()}
        nodes = {
            n: records.NodeAddress(node.address, node.port, f"rack{n}", n not in used)
            for n, node in enumerate(self.nodes)
            if n not in gone
        }
        restore = restore or records.Restore("initial", records.Generation(epoch, 0))
        return records.EpochRecord(epoch, seats, nodes, restore, **more)

    def open(self, record: records.EpochRecord) -> None:
        for node in self.nodes:
            if node.number in record.nodes:
                node.adopt(record)

    def join(
        self, layouts: Mapping[int, records.RoleLayout], record: records.EpochRecord | None = None
    ) -> list[Member]:
        """Open epoch 1, or that of the record, and register a member for each role on the node of
        its number."""
        record = record or self.record(1)
        self.open(record)
        return [Member(self.nodes[role], one, record.epoch) for role, one in layouts.items()]

    def close(self, epoch: int, gone: Collection[int] = ()) -> dict[int, records.Inventory]:
        live = [node for node in self.nodes if node.number not in gone]
        for node in live:
            node.close_epoch(epoch)
        return {node.number: node.inventory() for node in live}


def sources_from(
    inventories: Mapping[int, records.Inventory],
    generation: records.Generation,
    layouts: Mapping[int, records.RoleLayout],
    boundary: str = "step",
    first: int | None = None,
) -> dict[int, dict[str, tuple[records.Source, ...]]]:
    """What the planner would list; ``first`` is the node to try first."""
    found: dict[int, dict[str, tuple[records.Source, ...]]] = {}
    for role, layout in layouts.items():
        for name in (*layout.shard_parts, records.extras_part(boundary)):
            holders = [
                records.Source(node, role)
                for node, inventory in inventories.items()
                for holding in inventory.holdings
                if (holding.role, holding.generation) == (role, generation)
                and name in holding.parts
            ]
            holders.sort(key=lambda source: (source.node != first, source.node))
            assert holders, f"nobody holds {name} of role {role} at {generation}"
            found.setdefault(role, {})[name] = tuple(holders)
    return found


def memory(
    inventories: Mapping[int, records.Inventory],
    generation: records.Generation,
    layouts: Mapping[int, records.RoleLayout],
    boundary: str = "step",
    first: int | None = None,
) -> records.Restore:
    """Return what is restored from the sources of :func:`sources_from`."""
    found = sources_from(inventories, generation, layouts, boundary, first)
    return records.Restore("memory", generation, boundary, sources=found)


def record_of(
    epoch: int = 1, roles: Collection[int] = (0,), count: int = 2, **more: Any
) -> records.EpochRecord:
    """An epoch that begins with nothing, unless told: each role on the node of its number, the
    other ones of ``count`` nodes are spares."""
    nodes = {n: records.NodeAddress("fake", n, f"rack{n}", n not in roles) for n in range(count)}
    seats = {role: records.Seat(role, 0, 0) for role in roles}
    restore = records.Restore("initial", records.Generation(epoch, 0))
    return records.EpochRecord(
        **{"seats": seats, "nodes": nodes, "restore": restore, **more}, epoch=epoch
    )


@contextlib.contextmanager
def cluster(directory: Path, nodes: int, **options: Any) -> Iterator[Cluster]:
    """A started cluster that leaves nothing behind."""
    running = Cluster(directory, nodes, **options)
    try:
        running.start()
        yield running
    finally:
        running.stop()
