"""A session against a hand-driven agent: what it answers to records and closes, at any moment.

The link and its watcher thread are the real ones, over a socket pair; communicators, loop and entry
are replaced by ones that the test controls step by step.
"""

from __future__ import annotations

import dataclasses
import gc
import queue
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deadpool_megatron.cluster.member_link import MemberLink, StopOrder
from deadpool_megatron.comms import CommunicatorFault, EpochClosed
from deadpool_megatron.hooks import saving
from deadpool_megatron.hooks import session as session_module
from deadpool_megatron.hooks.dimension import PeerMismatch
from deadpool_megatron.hooks.entry import EpochEntry, RestoreFailed
from deadpool_megatron.hooks.interruption import forget_frames
from deadpool_megatron.hooks.loop import SteppedLoop
from deadpool_megatron.hooks.pausing import PausePoint
from deadpool_megatron.hooks.saving import DurableSaves
from deadpool_megatron.hooks.session import EXIT_UNCLEAN, Session
from deadpool_megatron.layout.records import EpochRecord, Generation, Restore, Seat
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault.errors import VaultError
from deadpool_megatron.wire import framing

SECONDS = 10.0
SEAT = Seat(0, 0, 0)
ELSEWHERE = Seat(1, 0, 0)
QUICK = dataclasses.replace(
    Settings(), close_seconds=0.4, drain_seconds=0.1, beat_interval_seconds=0.02, hash_interval=1
)


class Exited(BaseException):
    """In place of os._exit."""


class FakeCommunicators:
    """Closed by an interrupt; what a call in them raises then, and what a drain answers."""

    def __init__(self, **options: Any) -> None:
        self.closed = threading.Event()
        self.interrupted: list[int] = []
        self.clean = True

    def install(self) -> None:
        """Nothing to replace."""

    def interrupt(self, epoch: int) -> None:
        self.interrupted.append(epoch)
        self.closed.set()

    def drain(self) -> bool:
        assert self.closed.is_set(), "a drain of an open epoch would prove nothing"
        return self.clean

    def finish_iteration(self) -> None:
        """Nothing in flight."""

    def waiting_for(self) -> None:
        return None

    def progress(self) -> int:
        return 0

    def waited_seconds(self) -> float:
        return 0.0

    def collective(self) -> None:
        """Wait for peers that never come."""
        assert self.closed.wait(SECONDS)
        raise EpochClosed(self.interrupted[-1], "allreduce")


class FakeProtection:
    """Notes what it is told. Every generation is due."""

    is_wanted = True

    def __init__(self, calls: list[Any]) -> None:
        self.stall_seconds = 0.0
        self._calls = calls

    def announce(self, generation: Generation) -> None:
        self._calls.append(("announce", generation))

    def complete(self, extras: bytes) -> None:
        self._calls.append("complete")

    def append(self, generation: Generation, boundary: str, extras: bytes) -> None:
        self._calls.append(("append", generation, boundary))

    def holds(self, generation: Generation) -> bool:
        return bool(generation)

    def settle(self) -> None:
        self._calls.append("settle")


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
        self.program = SimpleNamespace(
            checkpoint_directory=lambda: None,
            spares_may_build=lambda: True,
            provisional_role=lambda wanted: wanted,
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

    def connect_store(self, record: EpochRecord, *, only_once: bool = False) -> None:
        self._stage("store")

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
        monkeypatch.setenv("DEADPOOL_WORLD_SIZE", "2")
        monkeypatch.delenv("DEADPOOL_PROVISIONAL_ROLE", raising=False)
        monkeypatch.delenv("DEADPOOL_FAULTS", raising=False)
        self.entry = FakeEntry()
        self.communicators = FakeCommunicators()
        monkeypatch.setattr(session_module, "Communicators", lambda **_: self.communicators)
        monkeypatch.setattr(session_module, "EpochEntry", self._make_entry)
        monkeypatch.setattr(session_module.os, "_exit", self._exit)
        self.socket, member = socket.socketpair()
        self.socket.settimeout(SECONDS)
        self.link = MemberLink(member, SEAT, "run", QUICK)
        self.session = Session(self.link, QUICK, folder)
        self.ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self.heard: list[dict[str, Any]] = []
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        self.expect("hello")

    def _make_entry(self, **options: Any) -> FakeEntry:
        self.emit = options["reports"].emit
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
        made = EpochRecord(epoch, seats, {}, restore, "127.0.0.1", 1, emitted_up_to=emitted_up_to)
        self.order("record", record=made.to_dict())

    def close(self, epoch: int) -> None:
        """Close an epoch."""
        self.order("close", epoch=epoch, cause="test")

    def expect(self, kind: str) -> dict[str, Any]:
        """The next message of a kind; all others are kept in ``heard``."""
        while True:
            message = framing.receive(self.socket)
            if message["t"] == "beat":
                continue
            self.heard.append(message)
            if message["t"] == kind:
                return message

    def end(self) -> BaseException | None:
        """Stop the run; answers what the session raised."""
        self.order("stop", reason="over")
        return self.result()

    def result(self) -> BaseException | None:
        """What the session raised, when it has ended; then all it said is in ``heard``."""
        answer = self.ended.get(timeout=SECONDS)
        self.thread.join(SECONDS)
        self.socket.setblocking(False)
        frames = framing.FrameBuffer()
        try:
            while piece := self.socket.recv(1 << 20):
                self.heard += [m for m in frames.feed(piece) if m["t"] != "beat"]
        except BlockingIOError:
            pass
        return answer

    def said(self, kind: str) -> list[dict[str, Any]]:
        """All messages of a kind that were heard so far."""
        return [message for message in self.heard if message["t"] == kind]


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Rig]:
    made = Rig(monkeypatch, tmp_path)
    yield made
    made.communicators.closed.set()
    made.order("stop", reason="the test is over")
    made.thread.join(SECONDS / 2)
    made.link.close()
    made.socket.close()
    made.link._connection.close()
    assert not made.thread.is_alive()


def drained(epoch: int, clean: bool = True) -> dict[str, Any]:
    return {"t": "drained", "epoch": epoch, "clean": clean}


# The ordinary way.


def test_plays_its_role_to_the_end_and_stays_available(rig: Rig) -> None:
    rig.record(1)
    done = rig.expect("done")
    assert done["epoch"] == 1
    assert done["state_hash"] == "hash"
    stages = [call for call in rig.entry.calls if isinstance(call, str)]
    assert stages[:5] == ["adopt", "rebuild", "restore", "sync", "verify"]
    assert rig.said("restored") == [{"t": "restored", "epoch": 1, "generation": [1, 0], "hash": ""}]
    # A late failure needs it again.
    rig.close(1)
    rig.expect("drained")
    rig.record(2, generation=Generation(1, 3))
    rig.expect("done")
    assert rig.end() is None
    assert rig.said("drained") == [drained(1)]


def test_boundaries_are_appended_in_order_and_replayed_where_they_are_due(rig: Rig) -> None:
    rig.record(1, generation=Generation(0, 2), boundary="step")
    rig.expect("done")
    assert rig.entry.loop.segments == [(2, "evaluation"), (4, "evaluation")]
    calls = rig.entry.calls
    first = calls.index(("append", Generation(0, 2), "evaluation"))
    assert first < calls.index(("announce", Generation(1, 3)))
    rig.close(1)
    rig.expect("drained")
    rig.entry.loop.segments.clear()
    rig.record(2, generation=Generation(0, 2), boundary="evaluation")
    rig.expect("done")
    assert rig.entry.loop.segments == [(4, "evaluation")]
    assert rig.end() is None


# Standing by.


def test_a_spare_builds_once_and_stays_warm(rig: Rig) -> None:
    rig.record(1, ELSEWHERE)
    assert rig.expect("warm")["provisional_role"] == 0
    rig.close(1)
    assert rig.expect("drained") == drained(1)
    rig.record(2, ELSEWHERE)
    rig.expect("warm")
    assert rig.entry.calls == ["build", "warm-up", "store", "store"]
    rig.close(2)
    rig.expect("drained")
    rig.record(3)
    rig.expect("done")
    assert rig.end() is None


def test_a_spare_does_without_the_store(rig: Rig) -> None:
    def unreachable() -> None:
        raise CommunicatorFault("store", "connect", "refused")

    rig.entry.acts["store"] = unreachable
    rig.record(1, ELSEWHERE)
    rig.expect("warm")
    assert rig.end() is None


@pytest.mark.parametrize("stage", ["build", "adopt"])
def test_a_close_does_not_wait_for_a_member_that_builds(rig: Rig, stage: str) -> None:
    building, go_on = threading.Event(), threading.Event()

    def build() -> None:
        building.set()
        assert go_on.wait(SECONDS)

    rig.entry.acts[stage] = build
    rig.record(1, ELSEWHERE if stage == "build" else SEAT)
    assert building.wait(SECONDS)
    rig.close(1)
    assert rig.expect("drained") == drained(1)
    del rig.entry.acts[stage]
    rig.record(2, generation=Generation(1, 0))
    go_on.set()
    rig.expect("done")
    assert rig.entry.calls.count("rebuild") == 1, "the closed epoch was not entered"
    assert rig.end() is None
    assert rig.said("drained") == [drained(1)]


# Leaving a closed epoch.


@pytest.mark.parametrize("stage", ["rebuild", "restore", "sync", "verify"])
def test_a_close_in_each_stage(rig: Rig, stage: str) -> None:
    rig.entry.acts[stage] = rig.communicators.collective
    rig.record(1)
    while stage not in rig.entry.calls:
        time.sleep(0.001)
    rig.close(1)
    assert rig.expect("drained") == drained(1)
    del rig.entry.acts[stage]
    rig.record(2)
    rig.expect("done")
    assert rig.end() is None
    assert rig.said("drained") == [drained(1)]
    assert rig.said("fault") == []


def test_a_close_in_a_step(rig: Rig) -> None:
    began = threading.Event()

    def step() -> None:
        began.set()
        rig.communicators.collective()

    rig.entry.loop.acts[2] = step
    rig.record(1)
    assert began.wait(SECONDS)
    rig.close(1)
    assert rig.expect("drained") == drained(1)
    assert rig.entry.calls[-1] == "quiesce"
    assert rig.entry.calls.count("complete") == 1, "the interrupted iteration is not sealed"
    rig.entry.loop.acts.clear()
    rig.record(2, generation=Generation(1, 1))
    rig.expect("done")
    assert rig.end() is None


def test_a_step_that_ends_after_the_close_is_not_sealed(rig: Rig) -> None:
    """An aborted NCCL returns junk and raises nothing (traps, A3)."""

    def step() -> None:
        rig.close(1)
        assert rig.communicators.closed.wait(SECONDS)

    rig.entry.loop.acts[1] = step
    rig.record(1)
    assert rig.expect("drained") == drained(1)
    assert "complete" not in rig.entry.calls
    assert rig.end() is None
    assert [m for m in rig.said("event") if m["event"]["kind"] == "state-hash"] == []


def test_closes_that_race_with_everything(rig: Rig) -> None:
    """Whatever the moment: each epoch is answered, in order, and the last one is played."""
    for epoch in range(1, 60):
        rig.record(epoch)
        if epoch % 3:
            time.sleep(0.0004 * (epoch % 7))
        rig.close(epoch)
        while rig.expect("drained")["epoch"] != epoch:
            pass
        rig.communicators.closed.clear()
    rig.record(60)
    rig.expect("done")
    assert rig.end() is None
    assert [m["epoch"] for m in rig.said("drained")] == list(range(1, 60)), "each exactly once"
    assert all(m["clean"] for m in rig.said("drained"))


def test_the_close_of_a_newer_epoch_ends_the_one_that_is_played(rig: Rig) -> None:
    """This node has not heard of epoch 2, only that it is over."""
    rig.entry.loop.acts[1] = rig.communicators.collective
    rig.record(1)
    rig.expect("restored")
    rig.close(2)
    assert rig.expect("drained") == drained(2)
    assert rig.end() is None


@pytest.mark.parametrize("unclean", ["communication", "device"])
def test_who_cannot_leave_cleanly_says_so_and_ends(rig: Rig, unclean: str) -> None:
    if unclean == "communication":
        rig.communicators.clean = False
    else:
        rig.entry.quiet = False
    rig.entry.loop.acts[1] = rig.communicators.collective
    rig.record(1)
    rig.expect("restored")
    rig.close(1)
    assert rig.expect("drained") == drained(1, clean=False)
    ended = rig.result()
    assert isinstance(ended, Exited)
    assert ended.args == (EXIT_UNCLEAN,)
    assert rig.said("drained") == [drained(1, clean=False)]
    assert "quiesce" in rig.entry.calls


# Exceptions that are no EpochClosed (rule 11).


def test_any_exception_after_a_close_counts_as_the_interrupt(
    rig: Rig, capfd: pytest.CaptureFixture[str]
) -> None:
    def step() -> None:
        try:
            rig.close(1)
            rig.communicators.collective()
        except EpochClosed:
            raise AssertionError("bucket group was not reset") from None

    rig.entry.loop.acts[1] = step
    rig.record(1)
    assert rig.expect("drained") == drained(1)
    assert rig.end() is None
    assert "epoch 1 ends here with AssertionError: bucket group" in capfd.readouterr().err


def test_an_exception_just_before_the_close_counts_as_well(rig: Rig) -> None:
    failed = threading.Event()

    def step() -> None:
        failed.set()
        raise RuntimeError("the size of the message is wrong")

    rig.entry.loop.acts[1] = step
    rig.record(1)
    assert failed.wait(SECONDS)
    time.sleep(QUICK.close_seconds / 4)
    rig.close(1)
    assert rig.expect("drained") == drained(1)
    rig.entry.loop.acts.clear()
    rig.record(2)
    rig.expect("done")
    assert rig.end() is None
    assert rig.said("fault") == []


def test_an_exception_without_a_close_is_the_programs_own(rig: Rig) -> None:
    def step() -> None:
        raise ZeroDivisionError("a bug in the program")

    rig.entry.loop.acts[1] = step
    started = time.monotonic()
    rig.record(1)
    ended = rig.result()
    assert time.monotonic() - started >= QUICK.close_seconds
    assert isinstance(ended, ZeroDivisionError)
    assert ended.__traceback__ is not None
    assert rig.said("drained") == []
    assert rig.entry.calls[-1] == "close"


def test_an_exception_while_building_ends_the_process_at_once(rig: Rig) -> None:
    """No peer has anything to do with it."""

    def build() -> None:
        raise ValueError("no such data")

    rig.entry.acts["adopt"] = build
    started = time.monotonic()
    rig.record(1)
    assert isinstance(rig.result(), ValueError)
    assert time.monotonic() - started < QUICK.close_seconds


@pytest.mark.parametrize(
    ("stage", "error", "kind", "wanted"),
    [
        ("restore", RestoreFailed("shard1", "no"), "restore-failed", {"part": "shard1"}),
        ("verify", PeerMismatch("parameters differ"), "restore-failed", {"part": ""}),
        ("restore", VaultError("no room"), "fault", {"group": "vault", "operation": "restore"}),
        ("rebuild", CommunicatorFault("WORLD", "attach", "late"), "fault", {"group": "WORLD"}),
    ],
    ids=["part-missing", "peers-differ", "vault", "communication"],
)
def test_failures_that_lead_to_a_new_decision(
    rig: Rig, stage: str, error: Exception, kind: str, wanted: dict[str, Any]
) -> None:
    """Only what is about the state may cast doubt on the generation."""

    def fail() -> None:
        raise error

    rig.entry.acts[stage] = fail
    rig.record(1)
    said = rig.expect(kind)
    assert said["epoch"] == 1
    assert {name: said[name] for name in wanted} == wanted
    rig.close(1)
    assert rig.expect("drained") == drained(1)
    del rig.entry.acts[stage]
    rig.record(2)
    rig.expect("done")
    assert rig.end() is None
    assert len(rig.said("fault") + rig.said("restore-failed")) == 1


def test_an_interrupt_without_a_close_is_reported_and_waited_out(rig: Rig) -> None:
    def step() -> None:
        raise EpochClosed(1, "allreduce")

    rig.entry.loop.acts[1] = step
    rig.record(1)
    assert rig.expect("fault")["text"] == "interrupted without a close"
    time.sleep(QUICK.close_seconds)
    assert rig.thread.is_alive()
    assert "quiesce" not in rig.entry.calls, "it has not left before the close"
    rig.close(1)
    assert rig.expect("drained") == drained(1)
    assert rig.end() is None


def test_the_end_of_the_run_ends_any_wait(rig: Rig) -> None:
    def fail() -> None:
        raise VaultError("no")

    rig.entry.acts["restore"] = fail
    rig.record(1)
    rig.expect("fault")
    assert rig.end() is None
    assert rig.said("drained") == []


# The planned pause.


def test_stands_still_protected_and_leaves_at_the_close(rig: Rig) -> None:
    rig.entry.loop.acts[2] = lambda: rig.session._on_pause(2)
    rig.record(1)
    assert rig.expect("paused") == {"t": "paused", "epoch": 1, "iteration": 2}
    assert rig.entry.calls[-1] == "settle"
    rig.close(1)
    assert rig.expect("drained") == drained(1)
    rig.record(2, generation=Generation(1, 2), boundary="evaluation")
    rig.expect("done")
    assert rig.end() is None
    assert rig.said("pause-refused") == []


def test_goes_on_when_another_role_was_past_the_boundary(rig: Rig) -> None:
    rig.entry.loop.acts[1] = lambda: rig.session._on_pause(1)
    rig.record(1)
    assert rig.expect("paused")["iteration"] == 1
    rig.order("pause", iteration=3)
    assert rig.expect("paused")["iteration"] == 3
    rig.close(1)
    rig.expect("drained")
    assert rig.end() is None


def test_refuses_at_once_when_the_next_iteration_has_begun(rig: Rig) -> None:
    """It cannot end that iteration: the others stand still before it."""

    def step() -> None:
        rig.order("pause", iteration=1)
        rig.communicators.collective()

    rig.entry.loop.acts[2] = step
    rig.record(1)
    assert rig.expect("pause-refused") == {"t": "pause-refused", "epoch": 1, "iteration": 2}
    rig.close(1)
    rig.expect("drained")
    rig.entry.loop.acts.clear()
    rig.record(2, generation=Generation(1, 1))
    rig.expect("done")
    assert rig.end() is None
    assert rig.said("paused") == []


def test_an_order_of_another_epoch_stops_nobody(rig: Rig) -> None:
    """A spare hears of the pause that ends in its taking the seat of the drained node."""
    rig.record(1, ELSEWHERE)
    rig.expect("warm")
    rig.order("pause", iteration=2)
    rig.close(1)
    rig.expect("drained")
    rig.record(2, generation=Generation(1, 2), boundary="evaluation")
    rig.expect("done")
    assert rig.end() is None
    assert rig.said("paused") == rig.said("pause-refused") == []


def test_an_order_to_pause_is_obeyed_or_refused_never_lost() -> None:
    for _ in range(300):
        point = PausePoint()
        point.may_start(1)
        answers: list[int | None] = []
        thread = threading.Thread(target=lambda p=point, a=answers: a.append(p.order(1)))
        thread.start()
        goes_on = point.may_start(2)
        thread.join()
        if goes_on and answers == [None]:
            # The order came between: then the order itself must have seen the start, or the next
            # question sees the order.
            pytest.fail("started although the order was accepted")
        assert goes_on == (answers == [2])


# Reports.


def test_nothing_is_reported_after_a_close_nor_twice_for_people(
    rig: Rig, capfd: pytest.CaptureFixture[str]
) -> None:
    outcome: list[BaseException] = []

    def log() -> None:
        number = rig.entry.loop.counters["iteration"] + 1
        rig.emit("log", {"level": "info", "text": f"line {number}"})
        rig.emit("step", {"iteration": number, "loss": "0x1p0"})

    def after_close() -> None:
        log()
        rig.close(1)
        assert rig.communicators.closed.wait(SECONDS)
        try:
            rig.emit("step", {"iteration": 99})
        except EpochClosed as error:
            outcome.append(error)
            raise

    rig.emit("step", {"iteration": 0})  # while it warms up
    rig.entry.loop.acts = {1: log, 2: log, 3: after_close}
    rig.record(1, emitted_up_to=1)
    rig.expect("drained")
    assert len(outcome) == 1
    assert rig.end() is None
    events = [message["event"] for message in rig.said("event")]
    assert [e["iteration"] for e in events if e["kind"] == "step"] == [1, 2, 3]
    assert [e["data"]["text"] for e in events if e["kind"] == "log"] == ["line 2", "line 3"]
    assert capfd.readouterr().out == "line 2\nline 3\n"


def test_a_durable_checkpoint_waits_for_its_own_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rig: Rig
) -> None:
    monkeypatch.setattr(saving, "dist", SimpleNamespace(barrier=lambda: None, get_rank=lambda: 0))
    asked: list[dict[str, Any]] = []
    reports = SimpleNamespace(say=lambda kind, **values: asked.append({"t": kind, **values}))
    checks = iter(range(1000))

    def check(epoch: int) -> None:
        assert epoch == 2
        turn = next(checks)
        if turn == 1:
            saves.done(5)  # for a request of an earlier epoch
        if turn == 3:
            saves.done(6)

    saves = DurableSaves(reports, check, rig.link.interrupt_fd, SECONDS)  # type: ignore[arg-type]
    loop = SimpleNamespace(save_checkpoint=lambda directory: None)
    saves.save(loop, tmp_path, 2, Generation(2, 6))  # type: ignore[arg-type]
    assert next(checks) == 4
    assert asked[0]["final"] == str(tmp_path / "iter_0000006")
    assert asked[0]["temporary"] == str(tmp_path / ".iter_0000006.epoch2")
    late = DurableSaves(reports, lambda epoch: None, rig.link.interrupt_fd, 0.01)  # type: ignore[arg-type]
    with pytest.raises(CommunicatorFault, match="not valid"):
        late.save(loop, tmp_path, 2, Generation(2, 7))  # type: ignore[arg-type]
    assert rig.end() is None


# What an interrupted step leaves behind.


class Activation:
    """Stands for a tensor of the dead step."""


def test_frames_of_the_interrupted_step_are_forgotten() -> None:
    alive: list[weakref.ref[Activation]] = []

    def keep() -> Activation:
        made = Activation()
        alive.append(weakref.ref(made))
        return made

    def inner() -> None:
        held = keep()
        raise RuntimeError(f"connection lost while {held} was on its way")

    def middle() -> None:
        held = keep()
        try:
            inner()
        except RuntimeError as error:
            raise EpochClosed(1, f"allreduce of {held}") from error

    def cleanup() -> None:
        held = keep()
        try:
            middle()
        finally:
            assert held is not None

    gc.disable()
    try:
        try:
            cleanup()
        except EpochClosed as error:
            closed = error
        assert [ref() is not None for ref in alive] == [True] * 3
        forget_frames(closed)
        assert [ref() for ref in alive] == [None] * 3
    finally:
        gc.enable()


def test_an_older_exception_that_was_kept_is_forgotten_too() -> None:
    alive: list[weakref.ref[Activation]] = []

    def fail() -> None:
        held = Activation()
        alive.append(weakref.ref(held))
        raise ValueError

    kept: list[BaseException] = []
    try:
        fail()
    except ValueError as error:
        kept.append(error)
    closed = EpochClosed(1, "wait")
    closed.__cause__ = kept[0]
    kept[0].__context__ = closed  # a ring
    forget_frames(closed)
    assert alive[0]() is None


def test_builds_anew_only_when_the_role_changes() -> None:
    built: list[tuple[str, int]] = []

    class Entry(EpochEntry):
        """Without anything to build."""

        def __init__(self) -> None:
            self.role = -1
            self._loop = None
            self.program: Any = SimpleNamespace(serves=lambda loop, role: False)

        def _make_groups(self, role: int, world_size: int) -> None:
            built.append(("groups", role))
            self.role = role

        def _make_loop(self) -> None:
            built.append(("loop", self.role))
            self._loop = FakeLoop()  # type: ignore[assignment]

    def record(kind: str) -> EpochRecord:
        restore = Restore(kind, Generation(1, 0))
        return EpochRecord(2, {0: SEAT, 1: ELSEWHERE}, {}, restore, "127.0.0.1", 1)

    entry = Entry()
    entry.adopt(record("memory"), 1)
    assert built == [("groups", 1), ("loop", 1)]
    entry.adopt(record("memory"), 1)
    entry.adopt(record("durable"), 1)
    assert len(built) == 2, "a survivor keeps all its objects"
    entry.adopt(record("memory"), 0)
    assert built[2:] == [("groups", 0), ("loop", 0)]
    entry.adopt(record("initial"), 0)
    assert built[4:] == [("groups", 0)], "the loop is made among peers"


def test_stop_order_is_no_failure(rig: Rig) -> None:
    def step() -> None:
        raise StopOrder("over")

    rig.entry.loop.acts[1] = step
    rig.record(1)
    assert rig.result() is None
