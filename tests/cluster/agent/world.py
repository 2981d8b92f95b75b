"""An agent, and everything around it: its coordinator, vaults, members, standby and run directory.

The agent is real, with all that it is made of; played are the processes that it starts, the other
end of each connection, and time. All that it does with them is a line, in the order in which it
does it.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deadpool_megatron.cluster.agent import (
    agent as agents,
    exporter,
    members,
    node_checker,
    stacks,
    standby_supervisor,
    vault_process,
)
from deadpool_megatron.cluster.agent.agent import Agent, AgentParts
from deadpool_megatron.cluster.link import agent_link
from deadpool_megatron.cluster.process import member_place, posix
from deadpool_megatron.cluster.process.children import ProcessEnd, Watch
from deadpool_megatron.cluster.process.fork_server import StartedMember, StartError
from deadpool_megatron.cluster.process.member_main import MemberSpec
from deadpool_megatron.cluster.run_directory import cleanup
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, RunInfo, write_json
from deadpool_megatron.cluster.run_directory.orphaned_slots import claim
from deadpool_megatron.events import Event
from deadpool_megatron.layout import records
from deadpool_megatron.layout.records import EpochRecord, Generation, Restore, Seat
from deadpool_megatron.preflight.eligibility import HostFacts
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault.control import VaultControl
from deadpool_megatron.vault.disk.pinned_snapshot import Snapshot
from deadpool_megatron.vault.errors import VaultError
from deadpool_megatron.wire import framing
from deadpool_megatron.wire.sealed_records import RecordReader
from tests.cluster.link.streams import Stream
from tests.common.virtual_time import VirtualLoop

FACTS = HostFacts("h0", noted="an earlier run")
_PID = 1 << 30
# Of no interest here, or not the same twice: between the first and the second.
_LONG = (
    *(("SETTINGS': '", "'"), ('"replicas":', "}}}$"), ('"address": ', '"health"')),
    *(('"(?:boot|vault_port|memory_bytes)": ', "[,}]"), ('"(?:wall|monotonic)_seconds": ', "[,}]")),
)
_USUAL: dict[str, Any] = {"status": {}, "dump": {}, "take": []}
_ERRORS: dict[str, Callable[[str], Exception]] = {
    "VaultError": VaultError,
    "StartError": StartError,
    "TimeoutError": lambda _: TimeoutError(),
    "Shortage": lambda text: OSError(errno.EAGAIN, text),
    "OSError": lambda text: OSError(errno.ENOENT, text),
}
_STACK = """
Current thread 0x0001 (most recent call first):
  File "/a/b/loop.py", line 7 in wait
  File "/a/b/main.py", line 9 in main
"""


class _Process(Watch):
    """A process that is played: it ends when it is killed, or as it is told."""

    def __init__(
        self, world: World, name: str, on_end: Callable[[ProcessEnd], None] | None
    ) -> None:
        world.pids[_PID + len(world.pids)] = name
        super().__init__(max(world.pids))
        self._world, self._name, self._on_end = world, name, on_end
        self.line: socket.socket | None = None

    def kill(self) -> None:
        if self.ending is None:
            self._world.note(f"kill {self._name}")
            ending = ProcessEnd(signal=signal.SIGKILL)
            asyncio.get_running_loop().call_later(self._world.dying_seconds, self.finish, ending)

    def finish(self, ending: ProcessEnd) -> None:
        if self.ending is None:
            super().finish(ending)


class _Control:
    """The connection to a vault. Answers are taken from ``world.answers``, by name of the order."""

    def __init__(self, world: World, on_event: Callable[[Any], None]) -> None:
        self._world, self.on_event, self._closed = world, on_event, 0

    def __getattr__(self, name: str) -> Any:
        async def order(*arguments: Any) -> Any:
            shown = ", ".join(map(_shown, arguments))
            if name != "status":
                self._world.note(f"vault: {name}({shown})")
            await asyncio.sleep(0)
            if name == "close_epoch":
                self._closed = arguments[0]
            usual = records.Inventory(0, self._closed) if name == "inventory" else _USUAL.get(name)
            answer = self._world.take(name, usual)
            if answer == "later":
                await asyncio.sleep(1.0)
                answer = _USUAL[name]
            if answer == "never":
                await asyncio.sleep(arguments[-1])
                raise TimeoutError("no answer")
            if name == "shutdown":
                self._world.processes["vault"].finish(ProcessEnd(exit_code=0))
            return answer

        return order


class _Connection(Stream):
    """One to the coordinator, which acknowledges beats there."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world, self.reader, self._sent = world, RecordReader(), framing.FrameBuffer()
        self._had = 0

    def write(self, data: bytes) -> None:
        for message in self._sent.feed(data):
            sent_at, self._had = message.pop("b", None), message.get("n", self._had)
            if message["t"] != "beat" or len(message) > 2:
                self._world.note(f"to the coordinator: {json.dumps(message)}")
            if sent_at is not None and self._world.acknowledges:
                ack = {"t": "ack", "n": self._had, "beat": sent_at}
                self.reader.feed_data(framing.encode(ack))

    def close(self) -> None:
        self._world.note("the connection is closed")

    def abort(self) -> None:
        self._world.note("the connection is reset")


def _shown(value: Any) -> str:
    if isinstance(value, EpochRecord):
        return f"record {value.epoch}, {value.restore}"
    if isinstance(value, list):
        return f"[{', '.join(map(str, value))}]"
    return str(value)


class _Printed:
    """Standard error."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note

    def write(self, text: str) -> None:
        if text.strip():
            self._note(f"prints: {text.strip()}")

    def flush(self) -> None:
        pass


class World:
    """``lines``: what was seen. ``is_reachable``: there is a coordinator; ``acknowledges``: it
    answers beats. ``next``: outcomes of orders to the vault, of starts and of questions, by
    name. ``dying_seconds``: how long a kill takes."""

    def __init__(self, directory: Path, patch: pytest.MonkeyPatch, **options: Any) -> None:
        self.lines: list[str] = []
        self.pids: dict[int, str] = {}
        self.processes: dict[str, _Process] = {}
        self.sockets: dict[str, tuple[socket.socket, framing.FrameBuffer]] = {}
        self.next: dict[str, list[Any]] = {}
        self.cpu: dict[int, tuple[str, int]] = {}
        self.is_reachable = self.acknowledges = True
        self.dying_seconds = options.pop("dying_seconds", 0.0)
        self.patch, self._directory = patch, directory
        run = RunDirectory(directory / "run")
        self.run_id = f"{os.getpid():08x}"
        settings = Settings(**options.pop("settings", {}))
        for name, outcomes in options.pop("next", {}).items():
            self.next[name] = [_outcome(one) for one in outcomes]
        found = options.pop("found", None)
        self._found = None if found is None else records.Inventory.from_dict(found)
        if options.pop("launcher", False):
            options["launcher_fd"], self._launcher = os.pipe()
        info = RunInfo(self.run_id, 2, 2, 1, 2, ("x",), settings)
        run.create(info)
        write_json(run.coordinator, {"host": "c0", "port": 1})
        os.close(cleanup.claim_segments(run, self.run_id))
        of_run: dict[str, Any] = {"run": run, "info": info, "directory": directory}
        how: dict[str, Any] = {"secret": b"", "host": "127.0.0.1", "domain": "rack", "facts": FACTS}
        how["standby"] = ("-m", "standby")
        self.options = agents.AgentOptions(0, **of_run, **how, **options)
        self._lock = claim(self.options.segments, 0)
        self._play()

    def _play(self) -> None:
        patch = self.patch
        for module in (standby_supervisor, exporter, vault_process):
            patch.setattr(module, "start_child", self._start_child)
        for module in (agents, node_checker):
            patch.setattr(module, "run_child", self._answer_of)
        patch.setattr(agents.sys, "stderr", _Printed(self.note))
        patch.setattr(agent_link, "open_stream", self._open_stream)
        patch.setattr(agent_link, "connect_stream", self._nothing)
        patch.setattr(VaultControl, "connect", self._connect)
        patch.setattr(posix, "kill", self._signal)
        patch.setattr(posix, "state_and_cpu_ticks", lambda pid: self.cpu.get(pid, ("R", 0)))
        patch.setattr(stacks, "_obstacle", lambda pid: "")
        patch.setattr(members.random, "uniform", lambda begin, end: end)
        patch.setattr(exporter.threading, "Thread", _AtOnce)

    def take(self, name: str, usual: Any = None) -> Any:
        """The next outcome of what has this name."""
        outcome = outcomes.pop(0) if (outcomes := self.next.get(name)) else usual
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    # What the agent uses.

    async def _nothing(self, *_: object) -> None:
        """Instead of a handshake."""

    async def _answer_of(self, command: Sequence[str], log: Path, limit_seconds: float) -> str:
        self.note(f"asks {' '.join(command)} ({log.name}) within {limit_seconds:g} s")
        return str(self.take("asked", ""))

    def _start_child(
        self, command: Sequence[str], on_end: Callable[[ProcessEnd], None], **how: Any
    ) -> _Process:
        name = command[1].removeprefix("deadpool_megatron.")
        self.take(name)
        stdin = how.pop("stdin", None)
        numbers = {str(number) for number in how.pop("sockets", ())}
        words = ["FD" if word in numbers else word for word in command]
        if isinstance(how["log"], Path):
            how["log"] = how["log"].name
        elif how["log"] is not None:
            how["log"] = "(open)"
        self.note(f"start {' '.join(words)} {how}")
        made = self.processes[name] = _Process(self, name, on_end)
        if stdin is not None:
            self.sockets[name] = socket.socket(fileno=os.dup(stdin)), framing.FrameBuffer()
            self.sockets[name][0].setblocking(False)
        return made

    def _starter(self) -> Any:
        async def start(spec: MemberSpec) -> StartedMember:
            name = f"member {spec.place.local_rank}.{spec.place.incarnation}"
            self.take(name)
            ours, theirs = socket.socketpair()
            theirs.setblocking(False)
            self.sockets[name] = theirs, framing.FrameBuffer()
            spec.log.touch()
            shown = {k: v for k, v in spec.environment.items() if "SETTINGS" not in k}
            shown |= {member_place.VARIABLE: spec.place.to_dict()}
            self.note(f"start {name} {spec.command} {spec.log.name} {json.dumps(shown)}")
            self.processes[name] = _Process(self, name, None)
            return StartedMember(self.processes[name], ours)

        def prepare(local_rank: int) -> None:
            self.take("prepared")
            self.note(f"prepare slot {local_rank}")

        close = partial(self.note, "starter is closed")
        return SimpleNamespace(start=start, prepare=prepare, close=close)

    async def _connect(self, path: Path, on_event: Callable[[Any], None], limit: float) -> _Control:
        await asyncio.sleep(0)
        self.take("connect")
        self.note(f"vault: connected at {path} within {limit:g} s")
        self.control = _Control(self, on_event)
        return self.control

    async def _open_stream(self, address: tuple[str, int]) -> tuple[RecordReader, _Connection]:
        self.note(f"connects to {address}")
        if not self.is_reachable:
            raise ConnectionRefusedError("nobody is there")
        self.connection = _Connection(self)
        return self.connection.reader, self.connection

    def _signal(self, pid: int, number: int = signal.SIGKILL) -> None:
        name = self.pids.get(pid, "this agent" if pid == os.getpid() else str(pid))
        self.note(f"signal {signal.Signals(number).name} to {name}")
        if number == posix.ASK_SIGNAL:
            for log in self.options.logs.glob("node0-rank*.log"):
                log.write_text(log.read_text() + _STACK)

    # Instead of files that are written by a thread.

    def replace(self, path: Path, text: str | None) -> None:
        values = json.loads(text) if text else {}
        shown = {key: values[key] for key in ("members", "slots", "segment_dir") if text}
        started = {
            self.pids.get(int(pid), "agent"): ticks
            for pid, ticks in values.get("started", {}).items()
        }
        self.note(f"{path.name} has {shown} {sorted(started)}" if text else f"{path.name} is gone")

    def finish_log(self, log: Path) -> None:
        self.note(f"{log.name} is over")

    async def close(self, limit_seconds: float) -> None:
        self.note(f"files are closed within {limit_seconds:g} s")

    # What a life consists of.

    def note(self, text: str) -> None:
        """Write down what has been sent before, and this."""
        for name, (end, frames) in self.sockets.items():
            try:
                data = end.recv(1 << 20)
            except OSError:
                continue
            self.lines += [f"    to {name}: {json.dumps(m)}" for m in frames.feed(data)]
        if text:
            self.lines.append(f"    {text}")

    def do(self, what: str, value: Any) -> float:
        """Carry out one line of a life; returns the seconds that it takes."""
        now = asyncio.get_running_loop().time()
        match what:
            case "wait":
                return float(value)
            case "coordinator":
                for message in value if isinstance(value, list) else [value]:
                    order = record(*message["enter"]) if "enter" in message else message
                    self.connection.reader.feed_data(framing.encode(order))
            case "coordinator ends":
                self.connection.reader.feed_eof()
            case "vault":
                self.control.on_event(Event.from_dict(value))
            case "standby":
                line = value if "trouble" in value or "over" in value else {**value, "at": now}
                self.sockets["standby"][0].sendall(framing.encode(line))
            case "next":
                for name, outcomes in value.items():
                    self.next.setdefault(name, []).extend(map(_outcome, outcomes))
            case "network":
                self.is_reachable, self.acknowledges = value
            case "signal":
                signal.raise_signal(signal.SIGTERM)
            case "launcher":
                os.write(self._launcher, b"1") if value else os.close(self._launcher)
            case "write":
                path = self.options.segments / value[0]
                path.parent.mkdir(exist_ok=True)
                path.write_text(value[1])
            case "move":
                (self.options.segments / value[0]).rename(self.options.segments / value[1])
            case "read":
                path = self.options.segments / value
                self.note(path.read_text().strip() if path.is_file() else "it is gone")
            case "state":
                self.cpu[self.processes[value[0]].pid] = (value[1], 1)
            case _ if what.endswith(" ends"):
                name, (how, printed) = what.removesuffix(" ends"), value
                file = name.replace("member ", "rank").replace(".", "-")
                with open(self.options.logs / f"node0-{file}.log", "a") as log:
                    log.write(printed)
                ending = ProcessEnd(how) if isinstance(how, int) else ProcessEnd(signal=9)
                self.processes[name].finish(ending)
            case _:
                for message in value if isinstance(value, list) else [value]:
                    data = message.encode() if message is value else framing.encode(message)
                    self.sockets[what][0].sendall(data)
        return 0.0

    def live(self, script: Sequence[str]) -> list[str]:
        """All lines of a life: those of the script, each with what comes of it."""

        async def run() -> None:
            loop = asyncio.get_running_loop()
            self.patch.setattr(time, "monotonic", loop.time)
            make_parts: Any = partial(AgentParts, starter=self._starter(), files=self)
            running = asyncio.create_task(Agent(self.options, self._found, make_parts).run())
            for line in ("wait: 0", *script):
                self.lines.append(line)
                what, _, value = line.partition(": ")
                text = value.replace("DIR", str(self._directory)).replace("RUN", self.run_id)
                await asyncio.sleep(self.do(what, json.loads(text)))
                for _ in range(60):
                    await asyncio.sleep(0)
                self.note("")
                if running.done():
                    running.result()
            del self.lines[0]
            self.note(f"exit status {await running}")
            loop.remove_signal_handler(signal.SIGTERM)

        before = set(Path("/proc/self/fd").iterdir())
        try:
            with asyncio.Runner(loop_factory=VirtualLoop) as runner:
                runner.run(run())
            left = sorted(p.name for p in self.options.segments.parent.glob("*"))
            self.lines.append(f"    in memory: {left}")
        finally:
            os.close(self._lock)
            for end, _ in self.sockets.values():
                end.close()
            cleanup.remove_segments(self.options.segments)
        left_open = set(Path("/proc/self/fd").iterdir()) - before
        self.lines.append(f"    left open: {len(left_open)}")
        return [self._plain(line) for line in self.lines]

    def _plain(self, line: str) -> str:
        for pid, name in self.pids.items():
            line = line.replace(str(pid), f"<{name}>")
        line = line.replace(str(self.options.segments), "SEGMENTS").replace(self.run_id, "RUN")
        line = line.replace(str(self._directory), "DIR").replace(
            f"-parent {os.getpid()}", "-parent"
        )
        if line.startswith("    "):
            for begin, end in _LONG:
                line = re.sub(f"({begin}).*?({end})", r"\1...\2", line)
        return re.sub(r"\d+\.\d{4,}", lambda number: f"{float(number[0]):.3f}", line)


def _outcome(value: Any) -> Any:
    """What an order, a start or a question comes to."""
    match value:
        case {"holdings": _}:
            return records.Inventory.from_dict(value)
        case [{"role": _}]:
            return [Snapshot.from_dict(one) for one in value]
        case str():
            kind, _, text = value.partition(": ")
            return _ERRORS[kind](text) if kind in _ERRORS else value
    return value


class _AtOnce:
    """A thread whose work is done when it is started."""

    def __init__(self, target: Callable[..., Any], args: tuple[Any, ...] = (), **_: Any) -> None:
        self._work = partial(target, *args)

    def start(self) -> None:
        self._work()

    def join(self, _: float) -> None:
        pass

    def is_alive(self) -> bool:
        return False


def record(epoch: int, seats: Sequence[Sequence[int]], nodes: Sequence[int]) -> dict[str, Any]:
    """The order to enter an epoch with these nodes; the roles have these seats."""
    taken = {seat[0] for seat in seats}
    places = {
        n: records.NodeAddress("127.0.0.1", 1, f"rack{n}", spare=n not in taken) for n in nodes
    }
    of_roles = {role: Seat(*seat) for role, seat in enumerate(seats)}
    made = EpochRecord(epoch, of_roles, places, Restore("initial", Generation(epoch, 0)))
    return {"t": "record", "record": made.to_dict()}
