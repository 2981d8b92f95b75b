"""The whole life of a coordinator, line by line: what its agents are told, what it writes, what it
shows.

Expected are the files in lives/. A change that is meant changes them as well: with
``DEADPOOL_TEST_WRITE=1`` in the environment these tests write them again, and the difference is
read like that of any other file.
"""

import asyncio
import json
import re
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from deadpool_megatron.cluster.coordinator import commands, service
from deadpool_megatron.cluster.coordinator.service import Coordinator
from deadpool_megatron.cluster.journal.journal import Journal
from deadpool_megatron.cluster.link import protocol
from deadpool_megatron.cluster.link.peers import AgentPeer
from deadpool_megatron.cluster.machine import inputs as ev
from deadpool_megatron.events import Event, Kind, read_events
from deadpool_megatron.layout.records import Generation, Holding, Inventory
from deadpool_megatron.wire.forms import write
from deadpool_megatron.wire.framing import FrameBuffer
from tests.cluster.coordinator.asked import deliver
from tests.cluster.journal.journal_steps import coordinator
from tests.cluster.link.streams import Stream
from tests.cluster.machine.rig import STEP, layout
from tests.common import lives

LIVES = Path(__file__).parent / "lives"
# What differs from one time to the next.
_VOLATILE = re.compile(
    r"seconds|^(now|phases|settings|schema|identity|boot|pid|hostname|token|host|secret|port|coordinator|started|address|beat)$"
)
_NAMES = {kind: name for name, kind in protocol.OF_MEMBERS.items()}


text_of = partial(lives.text, volatile=_VOLATILE)


class Life:
    """A coordinator and its agents; ``lines``: what was seen."""

    def __init__(self, one: Coordinator, directory: Path) -> None:
        self.one, self.directory = one, directory
        self.streams: dict[int, Stream] = {}
        self.numbers: dict[int, int] = {}
        self.lines: list[str] = []

    def join(self, node: int, again: bool = False, **more: object) -> None:
        writer: Any = Stream()
        old = self.one.peers.agents.get(node)
        peer = AgentPeer(node, f"boot{node}", writer, 0.0)
        if again and old is not None:
            peer.orders, peer.welcomed = old.orders, old.welcomed
        self.streams[node], self.one.peers.agents[node] = writer, peer
        message = {"t": "join", "node": node, "host": "h", "vault_port": 1, "domain": f"d{node}"}
        self.one.agent_joined(peer, {**message, **more}, again)

    def hear(self, node: int, message: dict[str, Any]) -> None:
        self.numbers[node] = number = self.numbers.get(node, 0) + 1
        peers = self.one.peers
        deliver(peers, peers.agents[node], {**message, "n": number})

    def say(self, said: ev.OfMember) -> None:
        m = {"t": _NAMES[type(said)], **write(said)}
        seat = {"slot": said.slot, "incarnation": said.incarnation}
        self.hear(said.node, {"t": "member", **seat, "m": m})

    def tell(self, node: int, event: Event) -> None:
        self.hear(node, protocol.report_of(event))

    async def settle(self, what: str) -> None:
        """Wait until nothing is left to do; write down what the agents were sent."""
        self.one.feed(ev.Tick())
        for _ in range(5):
            await asyncio.sleep(0.01)
            while self.one.tasks or self.one.files.writer.describe()["waiting"]:
                await asyncio.sleep(0.01)
        self.lines.append(f"{what}:")
        for node, stream in sorted(self.streams.items()):
            for message in FrameBuffer().feed(bytes(stream.sent)):
                text = text_of(message)
                self.lines.append(f"    to {node}: {text}")
            stream.sent.clear()

    def show(self) -> None:
        self.lines.append(f"    shown: {text_of(self.one.describe())}")

    async def open(self, epoch: int, generation: Generation, starts: dict[int, int]) -> None:
        """Both roles build and restore."""
        for node, incarnation in starts.items():
            self.say(ev.MemberHello(node, 0, incarnation, pid=7))
        await self.settle("members run")
        for node, incarnation in starts.items():
            self.say(ev.MemberRegistered(node, 0, incarnation, layout(node, 2)))
        for node in (0, 1):
            incarnation = self.one.state.seats.get(node).incarnation  # type: ignore[union-attr]
            self.say(ev.Restored(node, 0, incarnation, epoch, generation))
        await self.settle("all have restored")


async def live(one: Coordinator, directory: Path) -> list[str]:
    one.sign.is_fresh = lambda now: True  # type: ignore[method-assign]
    life = Life(one, directory)
    life.join(0)
    life.join(1)
    await life.settle("two join")
    await life.open(1, Generation(1, 0), {0: 0, 1: 0})
    life.show()
    for iteration in (1, 2, 3):
        for role in (0, 1):
            where = (1, role, role, iteration)
            life.tell(role, Event(Kind.STEP, *where, data={"loss": (1.5).hex()}))
            life.tell(role, Event(Kind.STATE_HASH, *where, data={"sha256": f"{iteration}"}))
            life.tell(role, Event(Kind.COMMITTED, *where, data={"bytes": 10, "ship_seconds": 1.0}))
            life.tell(role, Event(Kind.GATE_WAIT, *where, data={"seconds": 0.5, "over": True}))
    life.tell(0, Event(Kind.LOG, 1, 0, data={"level": "warning", "text": "of an agent"}))
    life.hear(1, {"t": "member", "slot": 0, "incarnation": 0, "m": phase("restore", 1)})
    life.hear(0, {"t": "member", "slot": 0, "incarnation": 0, "m": {"t": "of another version"}})
    life.hear(0, {"t": "inventory", "inventory": {}})
    await life.settle("they train")
    life.show()
    life.join(1, again=True, told=1)
    await life.settle("one connects again")
    life.say(ev.MemberFault(0, 0, 0, 1, "peer closed"))
    life.hear(1, {"t": "member-lost", "slot": 0, "incarnation": 0, "signal": 9})
    await life.settle("a process dies")
    for node in (0, 1):
        held = tuple(Holding(role, Generation(1, 3), STEP) for role in (0, 1))
        layouts = tuple(layout(role, 2) for role in (0, 1))
        inventory = Inventory(node, 1, held, layouts)
        life.hear(node, {"t": "inventory", "inventory": inventory.to_dict()})
    await life.settle("both say what they hold")
    life.show()
    await life.open(2, Generation(1, 3), {1: 1})
    late = {"loss": (2.5).hex()}
    life.tell(0, Event(Kind.STEP, 1, 0, 0, 9, data=late))
    life.tell(0, Event(Kind.STEP, 2, 0, 0, 4, data=late))
    life.tell(1, Event(Kind.STEP, 2, 1, 1, 4, data=late))
    life.hear(1, {"t": "member", "slot": 0, "incarnation": 1, "m": phase("replay", 2)})
    life.hear(0, {"t": "member", "slot": 0, "incarnation": 0, "m": done(0, 1)})
    await life.settle("they train on, and late reports come")
    life.show()
    one.orders.give(service.actions.DropNode(1, "it is left out", left_out=True))
    life.hear(1, {"t": "member-lost", "slot": 0, "incarnation": 1, "signal": 9})
    life.tell(1, Event(Kind.LOG, 2, 1, data={"level": "warning", "text": "the last word"}))
    await life.settle("a node is dropped, and what it still says is not taken")
    life.hear(0, {"t": "member", "slot": 0, "incarnation": 0, "m": done(0, 2)})
    await life.settle("a role is done")
    one.agent_left(one.peers.agents[0], "connection closed")
    await life.settle("the other one is gone")
    life.show()
    return ended(life)


def ended(life: Life) -> list[str]:
    """All lines, with those of the journal and of the events."""
    life.one.files.close(10.0)
    directory = life.directory
    for path in sorted((directory / "journal").rglob("*")):
        if path.is_file() and "request" not in path.name:  # as many as there was time for
            life.lines.append(f"journal: {path.name}")
    for event in read_events(directory / "run" / "events.jsonl"):
        life.lines.append(f"event: {text_of(event.to_dict())}")
    return [line.replace(str(directory), "DIR") for line in life.lines]


async def asked(one: Coordinator, directory: Path) -> list[str]:
    """Users ask for things; then both roles are done, one of them with a last save."""
    one.sign.is_fresh = lambda now: True  # type: ignore[method-assign]
    one.sign.look = lambda: 1  # type: ignore[method-assign]
    life = Life(one, directory)
    early = asyncio.create_task(one.command({"command": "status"}))
    await asyncio.sleep(0.05)
    assert not early.done(), "what earlier coordinators were asked is not known yet"
    await one._commands.requests.begin()
    await early
    life.join(0)
    life.join(1)
    await life.open(1, Generation(1, 0), {0: 0, 1: 0})
    for number, message in enumerate(
        [
            {"command": "info"},
            {"command": "status"},
            {"command": "no-such"},
            {"command": "attach", "hostname": "more"},
            {"command": "kill", "part": "role", "number": 5, "signal": "KILL"},
            {"command": "kill", "part": "node", "number": 9, "signal": "KILL"},
            {"command": "kill", "part": "role", "number": 1, "signal": "STOP"},
            {"command": "drain", "node": 1},
            {"command": "drain", "node": 4},
            {"command": "protect", "every": 2},
            {"command": "protect", "scheme": "parity", "group": 2},
            {"command": "protect", "every": 2},
            {"command": "persist", "directory": "not/absolute"},
            {"command": "persist", "directory": f"{directory}/export"},
        ]
    ):
        answer = await one.command({"token": f"t{number}", **message})
        text = text_of(answer)
        life.lines.append(f"{message['command']}: {text}")
        await life.settle("told")
    for iteration in (1, 2):
        for role in (0, 1):
            where = (1, role, role, iteration)
            life.tell(role, Event(Kind.STEP, *where, data={"loss": (1.5).hex()}))
    saves = directory / "saves"
    for unfinished in (".iter_0000001.epoch0", ".iter_0000001.epoch1", ".iter_0000002.epoch1"):
        (saves / unfinished).mkdir(parents=True)
        (saves / unfinished / "file").write_text("state")
    for epoch, iteration in ((0, 1), (1, 2), (1, 2), (1, 3)):
        final = f"{saves}/iter_000000{iteration}"
        where = {"temporary": f"{saves}/.iter_000000{iteration}.epoch1", "final": final}
        m = {"t": "durable-request", "epoch": epoch, "iteration": iteration, **where}
        life.hear(0, {"t": "member", "slot": 0, "incarnation": 0, "m": m})
        await life.settle(f"a role asks that iteration {iteration} of epoch {epoch} counts")
        life.lines.append(f"    saves: {sorted(path.name for path in saves.iterdir())}")
    for role in (0, 1):
        m = {**done(role, 1), "early": "", "unsaved": ""}
        life.hear(role, {"t": "member", "slot": 0, "incarnation": 0, "m": m})
    limit = time.monotonic() + 20.0
    while not all(stream.sent for stream in life.streams.values()):
        assert time.monotonic() < limit
        one.feed(ev.Tick())
        await asyncio.sleep(0.01)
    for node in (0, 1):
        peer = one.peers.agents.pop(node)
        one.agent_left(peer, "connection closed")
    await life.settle("both roles are done")
    assert one.over.is_set()
    life.lines.append(f"status {one.exit_status}")
    for path in sorted((directory / "run").glob("[fl]*.json")):
        text = text_of(json.loads(path.read_text()))
        life.lines.append(f"{path.name}: {text}")
    return ended(life)


def phase(name: str, epoch: int) -> dict[str, Any]:
    return {"t": "phase", "epoch": epoch, "phase": name, "seconds": 2.0}


def done(role: int, epoch: int) -> dict[str, Any]:
    said = {"t": "done", "epoch": epoch, "role": role, "state_hash": "ab", "samples": 5}
    return {**said, "extra": {"tokens": 3}}


@pytest.mark.parametrize("life", [live, asked])
def test_a_life_is_as_it_was_before(life, tmp_path, monkeypatch):
    monkeypatch.setattr(service, "end_process", lambda error: pytest.fail(repr(error)))
    monkeypatch.setattr(commands, "_KILL_SECONDS", 0.0)
    monkeypatch.setattr(commands, "_STATUS_SECONDS", 60.0)
    monkeypatch.setattr(commands, "_SHARE_OF_TIME", 1e9)  # made again for each who asks

    async def begin() -> list[str]:
        journal = Journal(tmp_path / "journal")
        return await life(coordinator(lambda name: journal, tmp_path, "run"), tmp_path)

    lives.hold(LIVES / f"{life.__name__}.txt", asyncio.run(begin()))
