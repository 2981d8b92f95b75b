"""A session in a thread of its own, over a socket pair: the test is its agent.

The link and its watcher thread are real; the test controls the replaced communicators, loop and
entry step by step.
"""

import contextlib
import dataclasses
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deadpool_megatron.cluster.link.member_link import MemberLink
from deadpool_megatron.cluster.process.member_place import MemberPlace
from deadpool_megatron.comms import EpochClosed
from deadpool_megatron.comms.in_flight.observation import Observation
from deadpool_megatron.layout.records import EpochRecord, Generation, Restore, Seat
from deadpool_megatron.member import session as session_module
from deadpool_megatron.member.entry import EpochEntry
from deadpool_megatron.member.loop import SteppedLoop
from deadpool_megatron.member.session import Session
from deadpool_megatron.settings import Settings
from deadpool_megatron.wire import framing

SECONDS = 10.0
SEAT, PLACE = Seat(0, 0, 0), MemberPlace(0, 0, 0, world_size=2)
ELSEWHERE = Seat(1, 0, 0)
QUICK = dataclasses.replace(
    Settings(), close_seconds=0.5, beat_interval_seconds=0.02, hash_interval=1
)


class Exited(BaseException):
    """In place of os._exit."""


class BareEntry(EpochEntry):
    """With everything taken away but what it is given."""

    def __init__(self, **given: Any) -> None:
        vars(self).update(given)


class FakeCommunicators(Observation):
    """Communicators that an interrupt closes; a call in them then raises. Without an epoch for
    observers."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.closed = threading.Event()
        self.interrupted: list[int] = []
        self.clean = True
        self.times_warmed = 0

    def install(self) -> None:
        """Nothing to replace."""

    def warm(self) -> None:
        self.times_warmed += 1

    def allow_long_waits(self, allows_long_waits: bool) -> None:
        """No operation takes time."""

    def interrupt(self, epoch: int) -> None:
        self.interrupted.append(epoch)
        self.closed.set()

    def drain(self) -> bool:
        assert self.closed.is_set(), "a drain of an open epoch would prove nothing"
        return self.clean

    @property
    def unusable_reason(self) -> str:
        return "" if self.clean else "something still writes"

    def finish_iteration(self) -> None:
        """Nothing in flight."""

    def collective(self) -> None:
        """Wait for peers that never come."""
        assert self.closed.wait(SECONDS)
        raise EpochClosed(self.interrupted[-1], "allreduce")


class FakeProtection:
    """Records its calls. Every generation is due."""

    is_due = is_gated = True

    def __init__(self, calls: list[Any]) -> None:
        self.stall_seconds = 0.0
        self._calls = calls

    def announce(self, generation: Generation) -> None:
        self._calls.append(("announce", generation))

    def gate(self) -> None:
        self._calls.append("gate")

    def complete(self, extras: bytes) -> None:
        self._calls.append("complete")

    def append(self, generation: Generation, boundary: str, extras: bytes) -> None:
        self._calls.append(("append", generation, boundary))

    def holds(self, generation: Generation) -> bool:
        return bool(generation)

    def await_committed(self) -> None:
        self._calls.append("await_committed")

    end = await_committed


class FakeLoop(SteppedLoop):
    """Four iterations, evaluation after each second one; ``acts`` replace what a step does."""

    def __init__(self) -> None:
        self.counters = {"iteration": 0, "consumed_train_samples": 0}
        self.acts: dict[int, Callable[[], None]] = {}
        self.segments: list[tuple[int, str]] = []

    @property
    def done(self) -> bool:
        return self.counters["iteration"] >= 4

    def train_step(self) -> None:
        self.acts.get(self.counters["iteration"] + 1, lambda: None)()
        self.counters["iteration"] += 1

    def segments_after(self, iteration: int) -> tuple[str, ...]:
        return ("evaluation",) if iteration % 2 == 0 else ()

    def run_segment(self, name: str) -> None:
        self.segments.append((self.counters["iteration"], name))

    def save_checkpoint(self, directory: Path) -> None:
        """Nothing to write."""

    def load_checkpoint(self, directory: Path) -> None:
        """Nothing to read."""

    def reset_after_interrupt(self) -> None:
        """Nothing in flight."""

    def state_hash(self) -> str:
        return "hash"

    def stage_class(self) -> str:
        return "pp0"


class FakeEntry:
    """Plays EpochEntry. ``acts`` are called in the stage of that name."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.acts: dict[str, Callable[[], None]] = {}
        self.loop = FakeLoop()
        self.protection = FakeProtection(self.calls)
        self.generation = Generation(0, 0)
        self.boundary = "step"
        self.role = -1
        self.quiet = True
        framework = SimpleNamespace(entry_digests=dict)
        self.built = SimpleNamespace(audit=None, framework=framework)
        self.program = SimpleNamespace(
            checkpoint_directory=lambda: None,
            spares_may_build=lambda: True,
            provisional_role=lambda wanted, world_size: wanted,
        )

    @property
    def is_built(self) -> bool:
        return self.role >= 0

    def _stage(self, name: str) -> None:
        self.calls.append(name)
        self.acts.get(name, lambda: None)()

    def build_detached(self, role: int, world_size: int) -> None:
        self._stage("build")
        self.role = role

    def warm_up(self) -> None:
        self._stage("warm-up")

    def adopt(self, record: EpochRecord, role: int) -> None:
        self._stage("adopt")
        self.role = role

    def rebuild(self, record: EpochRecord, role: int) -> None:
        self._stage("rebuild")

    def restore(self, record: EpochRecord, role: int) -> None:
        self._stage("restore")
        self.generation = record.restore.generation
        self.boundary = record.restore.boundary
        self.loop.counters["iteration"] = self.generation.iteration

    def synchronise(self, record: EpochRecord, role: int) -> None:
        self._stage("sync")

    def verify(self, record: EpochRecord, role: int) -> None:
        self._stage("verify")

    def capture_extras(self) -> bytes:
        return b""

    def quiesce(self, deadline_seconds: float) -> bool:
        self._stage("quiesce")
        return self.quiet

    def close(self) -> None:
        self.calls.append("close")


class Rig:
    """The session in a thread of its own; the test is its agent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        monkeypatch.delenv("DEADPOOL_FAULTS", raising=False)
        self.entry = FakeEntry()
        self.communicators = FakeCommunicators()
        monkeypatch.setattr(session_module, "Communicators", lambda *_: self.communicators)
        monkeypatch.setattr(session_module, "EpochEntry", self._make_entry)
        monkeypatch.setattr(session_module.os, "_exit", self._exit)
        self.socket, member = socket.socketpair()
        self.socket.settimeout(SECONDS)
        self.link = MemberLink(member, PLACE, "run", QUICK)
        self.session = Session(self.link, folder)
        self.ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self.received: list[dict[str, Any]] = []
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        self.expect("hello")

    def _make_entry(self, *given: Any) -> FakeEntry:
        _, link, self.entry.communicators, self.entry.reports = given
        self.entry.settings, self.emit = link.settings, self.entry.reports.emit
        return self.entry

    def _exit(self, code: int) -> None:
        raise Exited(code)

    def _run(self) -> None:
        try:
            self.session.run(None)  # type: ignore[arg-type]
            self.ended.put(None)
        except BaseException as error:
            self.ended.put(error)

    def order(self, kind: str, **values: Any) -> None:
        """One message of the agent."""
        framing.send(self.socket, {"t": kind, **values})

    def record(
        self,
        epoch: int,
        seat: Seat = SEAT,
        generation: Generation | None = None,
        boundary: str = "step",
        emitted_up_to: int = 0,
    ) -> None:
        """The record of an epoch in which ``seat`` plays role 0."""
        kind = "initial" if generation is None else "memory"
        restore = Restore(kind, generation or Generation(epoch, 0), boundary)
        seats = {0: seat, 1: ELSEWHERE}
        made = EpochRecord(epoch, seats, {}, restore, emitted_up_to=emitted_up_to)
        self.order("record", record=made.to_dict())

    def close(self, epoch: int) -> None:
        """Close an epoch."""
        self.order("close", epoch=epoch, cause="test")

    def drain(self, epoch: int) -> None:
        """Close an epoch, which is then drained."""
        self.close(epoch)
        assert self.expect("drained") == drained(epoch)

    def expect(self, kind: str) -> dict[str, Any]:
        """Return the next message of a kind; all are kept in ``received``."""
        while True:
            message = framing.receive(self.socket)
            if message["t"] == "beat":
                continue
            self.received.append(message)
            if message["t"] == kind:
                return message

    def ends_well(self) -> None:
        """The program has come to its end, and so does the session."""
        self.expect("done")
        assert self.end() is None

    def end(self) -> BaseException | None:
        """Stop the run; answers what the session raised."""
        self.order("stop", reason="over")
        return self.result()

    def result(self) -> BaseException | None:
        """Return the exception of the ended session; all its messages are then in ``received``."""
        answer = self.ended.get(timeout=SECONDS)
        self.thread.join(SECONDS)
        self.socket.setblocking(False)
        frames = framing.FrameBuffer()
        try:
            while piece := self.socket.recv(1 << 20):
                self.received += [m for m in frames.feed(piece) if m["t"] != "beat"]
        except BlockingIOError:
            pass
        return answer

    def messages(self, kind: str) -> list[dict[str, Any]]:
        """Return all messages of a kind so far."""
        return [message for message in self.received if message["t"] == kind]


@contextlib.contextmanager
def session(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[Rig]:
    """A rig that is ended, whatever came of it."""
    made = Rig(monkeypatch, folder)
    yield made
    made.communicators.closed.set()
    made.order("stop", reason="the test is over")
    made.thread.join(SECONDS / 2)
    made.link.close()
    made.socket.close()
    made.link._connection.close()
    assert not made.thread.is_alive()


@pytest.fixture
def rig(monkeypatch, tmp_path):
    with session(monkeypatch, tmp_path) as made:
        yield made


def drained(epoch: int, clean: bool = True) -> dict[str, Any]:
    return {"t": "drained", "epoch": epoch, "clean": clean}
