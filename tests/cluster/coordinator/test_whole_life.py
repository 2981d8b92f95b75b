"""The whole life of coordinators, one after the other, in virtual time: entries of the journal,
orders, events and output; see lives/."""

import asyncio
import errno
import json
import re
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deadpool_megatron.cluster.coordinator import new_checkpoint, service, stepper
from deadpool_megatron.cluster.coordinator.files import EventWriter, RunFiles
from deadpool_megatron.cluster.journal.journal import Journal, JournalError
from deadpool_megatron.cluster.journal.terms import claim_term
from deadpool_megatron.cluster.link.peers import AgentPeer
from deadpool_megatron.cluster.machine.actions import DropNode
from deadpool_megatron.events import Event
from deadpool_megatron.observe.notify import Outlet
from deadpool_megatron.wire.framing import FrameBuffer
from tests.cluster.coordinator.asked import deliver
from tests.cluster.journal.journal_steps import coordinator
from tests.cluster.link.streams import Stream
from tests.cluster.machine.rig import layout
from tests.common import lives
from tests.common.virtual_time import VirtualLoop

PATH = Path(__file__).parent / "lives" / "whole.txt"
_BEAT_SECONDS = 0.5
# Keys of values that differ from one time to the next.
_VOLATILE = re.compile(
    r"seconds|^(now|phases|settings|schema|identity|boot|pid|hostname|token|host|secret|port|coordinator|started|address|beat)$"
)
text_of = partial(lives.text, volatile=_VOLATILE)


class Hangs(Exception):
    """The disk does not answer."""


class _AtOnceLoop(VirtualLoop):
    """A loop that does at once the work for threads, unless that hangs."""

    def __init__(self) -> None:
        super().__init__()
        self.hanging: list[tuple[Any, Callable[..., Any], tuple[Any, ...]]] = []

    def run_in_executor(self, _: Any, function: Callable[..., Any], *given: Any) -> Any:
        done = self.create_future()
        try:
            done.set_result(function(*given))
        except Hangs:
            self.hanging.append((done, function, given))
        except Exception as error:
            done.set_exception(error)
        return done


class Whole:
    """Coordinators and their agents; each line of the script happens to them."""

    def __init__(self, directory: Path, patch: pytest.MonkeyPatch) -> None:
        self.lines: list[str] = []
        self._directory, self._patch, self._journal = directory, patch, Journal(directory / "j")
        self._broken = self._full = self._hanging = ""
        self._beats: dict[int, dict[str, Any]] = {}
        self._silent: set[int] = set()
        self._loop = _AtOnceLoop()
        self._streams: dict[int, Stream] = {}
        self._numbers: dict[int, int] = {}
        write, write_result, put = Journal.write, RunFiles.write_result, Outlet.put
        sync_all = new_checkpoint._sync_all

        def written(journal: Journal, kind: str, number: int, entry: Any) -> None:
            if self._broken:
                raise JournalError(self._broken)
            write(journal, kind, number, entry)
            self._note(f"journal: {kind} {number}")

        def synced(directory: Path) -> None:
            if self._hanging == "save":
                raise Hangs
            sync_all(directory)

        def result(files: RunFiles, *given: Any) -> None:
            if self._hanging == "result":
                raise Hangs
            if self._full:
                raise OSError(errno.ENOSPC, self._full)
            write_result(files, *given)
            self._note("the result is written")

        def sent(outlet: Outlet, notice: Any) -> None:
            put(outlet, notice)
            outlet.flush(time.monotonic() + 60.0)  # its thread may warn

        def event(_: EventWriter, found: Event) -> None:
            self._note(f"event: {text_of(found.to_dict())}")

        def printed(text: str) -> None:
            if text.strip() and not text.startswith((" ", "Traceback")):
                self._note(f"prints: {text.strip()}")

        patch.setattr(Journal, "write", written)
        patch.setattr(new_checkpoint, "_sync_all", synced)
        patch.setattr(RunFiles, "write_result", result)
        patch.setattr(EventWriter, "write", event)
        patch.setattr(Outlet, "put", sent)
        patch.setattr(service.sys, "stderr", SimpleNamespace(write=printed, flush=int))
        for module in (service, stepper):
            patch.setattr(module, "end_process", lambda error: pytest.fail(repr(error)))
        close = partial(self._note, "it does not listen any more")
        listener = SimpleNamespace(run=asyncio.Event().wait, close=close)
        patch.setattr(service, "Listener", lambda *_: listener)
        patch.setattr(AgentPeer, "undelivered_bytes", lambda peer: peer.node)

    def _note(self, text: str) -> None:
        self.lines.append(f"    {text}")

    def _begin(self) -> None:
        self._coordinator = coordinator(lambda name: self._journal, self._directory, "run")
        self._streams.clear()
        self._numbers.clear()
        self._running = asyncio.create_task(self._coordinator.run())

    def _join(self, node: int, again: bool = False, **more: object) -> None:
        agents = self._coordinator.peers.agents
        writer: Any = Stream()
        old, peer = agents.get(node), AgentPeer(node, f"boot{node}", writer, 0.0)
        if again and old is not None:
            peer.orders, peer.welcomed = old.orders, old.welcomed
        self._streams[node], agents[node] = writer, peer
        message = {"t": "join", "node": node, "host": "h", "vault_port": 1, "domain": f"d{node}"}
        self._coordinator.agent_joined(peer, {**message, **more}, again)

    def _send(self, node: int, message: dict[str, Any]) -> None:
        self._numbers[node] = number = self._numbers.get(node, 0) + 1
        peers = self._coordinator.peers
        deliver(peers, peers.agents[node], {**message, "n": number})

    async def _beating(self) -> None:
        while True:
            await asyncio.sleep(_BEAT_SECONDS)
            for node in [*self._streams]:
                peers = self._coordinator.peers
                if node in peers.agents and node not in self._silent:
                    beat = {"t": "beat", "b": 0.0, "o": 99, **self._beats.get(node, {})}
                    deliver(peers, peers.agents[node], beat)

    async def do(self, command: str, value: Any) -> None:
        match command.split():
            case ["wait"]:
                await asyncio.sleep(value)
            case ["join", node]:
                self._join(int(node), **value)
            case ["node", node]:
                self._send(int(node), value)
            case ["members"]:
                for node, m in value:
                    seat = {"slot": 0, "incarnation": m.pop("incarnation", 0)}
                    if m["t"] == "registered":
                        m["layout"] = layout(node, 2).to_dict()
                    self._send(node, {"t": "member", **seat, "m": m})
            case ["beats", node]:
                self._beats[int(node)] = value
            case ["silent"]:
                self._silent = set(value)
            case ["leaves", node]:
                peer = self._coordinator.peers.agents.pop(int(node))
                self._coordinator.agent_left(peer, value)
            case ["asks"]:
                answer = await self._coordinator.command({"token": "t", **value})
                self._note(f"answer: {text_of(answer)}")
            case ["journal"]:
                self._broken = value
            case ["result"]:
                self._full = value
            case ["hangs"]:
                self._hanging = value
            case ["answers"]:
                self._hanging = ""
                for done, function, given in self._loop.hanging:
                    done.set_result(function(*given))
            case ["term"]:
                claim_term(self._journal, value, "h", 1, 1)
            case ["dropped", node]:
                self._coordinator.orders.give(DropNode(int(node), value, excluded=True))
            case ["file"]:
                path = self._directory / value
                path.parent.mkdir(parents=True)
                path.touch()
            case ["removed"]:
                shutil.rmtree(self._directory / value)
            case ["there"]:
                found = sorted((self._directory / value).rglob("*"))
                self._note(f"{[str(p.relative_to(self._directory)) for p in found]}")
            case ["signal"]:
                signal.raise_signal(signal.Signals[value])
            case ["next"]:
                self._running.cancel()
                await asyncio.wait({self._running})
                self._begin()

    async def _settle(self) -> None:
        for _ in range(30):
            await asyncio.sleep(0)
        for node, stream in sorted(self._streams.items()):
            for message in FrameBuffer().feed(bytes(stream.sent)):
                if message["t"] not in ("ack", "ping"):
                    self._note(f"to {node}: {text_of(message)}")
            stream.sent.clear()

    def live(self, script: Sequence[str]) -> list[str]:
        async def run() -> None:
            for name in ("monotonic", "time"):
                self._patch.setattr(time, name, asyncio.get_running_loop().time)
            self._begin()
            beating = asyncio.create_task(self._beating())
            await self._settle()
            for line in script:
                self.lines.append(line)
                command, _, value = line.replace("DIR", str(self._directory)).partition(": ")
                await self.do(command, json.loads(value))
                await self._settle()
            if self._running.done():
                self._note(f"exit status {self._running.result()}")
            beating.cancel()
            self._running.cancel()

        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(run())
        for path in sorted((self._directory / "run").glob("[fl]*.json")):
            text = text_of(json.loads(path.read_text()))
            self._note(f"{path.name}: {text}")
        text = "\n".join(self.lines).replace(str(self._directory), "DIR")
        text = re.sub(r"\b(\d+)\.[0-9a-f]{8}\.(\d+)", r"\1.PLACE.\2", text)
        return re.sub(r"\d+\.\d{3,}", lambda m: f"{float(m[0]):.2f}", text).split("\n")


def live(script: Sequence[str], _: dict[str, Any], directory: Path) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        return Whole(directory, patch).live(script)


def test_a_life_is_as_it_was_before(tmp_path):
    lives.compare(PATH, live, tmp_path)
