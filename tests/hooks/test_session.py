"""A session against a hand-driven agent: what it answers to records and closes, at any moment."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock, call

import pytest
import torch

from deadpool_megatron.cluster.failures import ExitStatus
from deadpool_megatron.comms import CommunicatorFault, EpochClosed
from deadpool_megatron.hooks import epoch_runner
from deadpool_megatron.hooks.entry import EpochEntry, RestoreFailed
from deadpool_megatron.hooks.epoch_runner import EpochRunner
from deadpool_megatron.layout.records import EpochRecord, Generation, Restore
from deadpool_megatron.layout.schemes import ProtectionPlan
from deadpool_megatron.wire.framing import readable
from tests.hooks.session_rig import (
    ELSEWHERE,
    SEAT,
    SECONDS,
    BareEntry,
    Exited,
    FakeLoop,
    Rig,
    drained,
)

# The ordinary way.


def test_an_iteration_without_an_update_passes_the_gate_with_all_roles(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its slot would be one that another role may still need; no optimizer step has asked."""
    calls = rig.entry.calls
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda _: calls.append("all roles"))
    rig.entry.protection.is_gated = False
    rig.record(1, generation=Generation(0, 3), boundary="save")
    rig.expect("done")
    announced = calls.index(("announce", Generation(1, 4)))
    assert calls[announced + 1 :][:3] == ["gate", "all roles", "complete"]
    assert rig.end() is None


# Standing by.


@pytest.mark.parametrize("stage", ["build", "adopt"])
def test_a_close_does_not_wait_for_a_member_that_builds(rig: Rig, stage: str) -> None:
    building, go_on = threading.Event(), threading.Event()

    def build() -> None:
        building.set()
        assert go_on.wait(SECONDS)

    rig.entry.acts[stage] = build
    rig.record(1, ELSEWHERE if stage == "build" else SEAT)
    assert building.wait(SECONDS)
    rig.drain(1)
    del rig.entry.acts[stage]
    rig.record(2, generation=Generation(1, 0))
    go_on.set()
    rig.expect("done")
    assert rig.entry.calls.count("rebuild") == 1, "the closed epoch was not entered"
    assert rig.end() is None
    assert rig.said("drained") == [drained(1)]


def test_a_loop_that_reports_while_it_is_built_survives_a_close(rig: Rig) -> None:
    def build() -> None:
        rig.emit("training", {"iterations": 4})
        rig.close(1)
        assert readable(rig.link.interrupt_fd, SECONDS)
        rig.emit("log", {"level": "info", "text": "so many parameters"})

    rig.entry.acts["adopt"] = build
    rig.record(1)
    assert rig.expect("drained") == drained(1)
    del rig.entry.acts["adopt"]
    rig.record(2)
    rig.ends_well()
    told = [m["event"] for m in rig.said("event") if m["event"]["kind"] in ("training", "log")]
    assert [(event["kind"], event["epoch"]) for event in told] == [("training", 1)]


# Leaving a closed epoch.


@pytest.mark.parametrize("stage", ["rebuild", "restore", "sync", "verify"])
def test_a_close_in_each_stage(rig: Rig, stage: str) -> None:
    rig.entry.acts[stage] = rig.communicators.collective
    rig.record(1)
    while stage not in rig.entry.calls:
        time.sleep(0.001)
    rig.drain(1)
    del rig.entry.acts[stage]
    rig.record(2)
    rig.ends_well()
    assert rig.said("drained") == [drained(1)]
    assert rig.said("fault") == []


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
    assert [m for m in rig.heard if m.get("event", {}).get("kind") == "state-hash"] == []


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
    rig.ends_well()
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
    assert ended.args == (ExitStatus.UNCLEAN,)
    assert rig.said("drained") == [drained(1, clean=False)]
    assert "quiesce" in rig.entry.calls


def test_builds_anew_only_when_the_role_changes() -> None:
    built: list[tuple[str, int]] = []

    class Entry(BareEntry):
        """Without anything to build."""

        def _make_groups(self, role: int, world_size: int) -> None:
            built.append(("groups", role))
            self.role = role

        def _make_loop(self) -> None:
            built.append(("loop", self.role))
            self._built: Any = SimpleNamespace(loop=FakeLoop())

    def record(kind: str) -> EpochRecord:
        restore = Restore(kind, Generation(1, 0))
        return EpochRecord(2, {0: SEAT, 1: ELSEWHERE}, {}, restore)

    entry = Entry(role=-1, _built=None, program=SimpleNamespace(serves=lambda *_: False))
    entry.adopt(record("memory"), 1)
    assert built == [("groups", 1), ("loop", 1)]
    entry.adopt(record("memory"), 1)
    entry.adopt(record("durable"), 1)
    assert len(built) == 2, "a survivor keeps all its objects"
    entry.adopt(record("memory"), 0)
    assert built[2:] == [("groups", 0), ("loop", 0)]
    entry.adopt(record("initial"), 0)
    assert built[4:] == [("groups", 0)], "the loop is made among peers"


class CheckpointException(BaseException):
    """As torch raises it: what went wrong on each rank, with its frames."""

    def __init__(self, *failures: BaseException) -> None:
        super().__init__("CheckpointException ranks:dict_keys([0])")
        self.failures = {rank: (error, None) for rank, error in enumerate(failures)}


FAULT = CommunicatorFault("world", "all_reduce", "peer closed")


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (FileNotFoundError(2, "No such file or directory"), "FileNotFoundError"),
        (CheckpointException(OSError(22, "Invalid argument"), FAULT), CommunicatorFault),
        (CheckpointException(EOFError("Ran out of input")), "EOFError: Ran out of input"),
        (SystemExit(), "SystemExit"),
        (FAULT, CommunicatorFault),
        (MemoryError(), MemoryError),
        (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError),
        (RuntimeError("CUDA error: unspecified launch failure"), RuntimeError),
        (EpochClosed(1, "load"), EpochClosed),
    ],
)
def test_who_is_to_blame_for_a_checkpoint_that_is_not_loaded(
    error: BaseException, raised: str | type[BaseException], tmp_path: Path
) -> None:
    """A text: the checkpoint; another source is tried then."""

    entry: Any = SimpleNamespace(loop=SimpleNamespace(load_checkpoint=Mock(side_effect=error)))
    wanted = RestoreFailed if isinstance(raised, str) else raised
    (tmp_path / "7").mkdir()
    with pytest.raises(wanted) as told:
        EpochEntry._load(entry, tmp_path / "7")
    assert type(told.value) is wanted
    if isinstance(raised, str):
        assert "/7 cannot be loaded" in str(told.value)
        assert raised in str(told.value)


def calls(whole: MagicMock) -> list[str]:
    return [name.removeprefix("entry.") for name, *_ in whole.mock_calls if "__" not in name]


def runner_of(whole: MagicMock) -> EpochRunner:
    """From iteration 1 of epoch 1 on; the first of epoch 2 is 2."""
    whole.entry.generation, whole.entry.boundary = Generation(1, 1), "step"
    whole.entry.reports.role = 0
    whole.entry.settings.hash_interval = 2
    whole.pause.may_start.return_value = True
    restore = Restore("memory", Generation(1, 1))
    record = EpochRecord(2, {}, {}, restore, protection=ProtectionPlan(every=3))
    runner = EpochRunner(record, whole.entry, whole.pause, whole.own_time, Path("saves"))
    whole.reset_mock()
    return runner


def test_a_segment_takes_its_steps_in_order() -> None:
    """A state is judged before it is saved, and counts as protected when all is over."""
    whole = MagicMock()
    runner = runner_of(whole)
    for boundary in ("evaluation", "save", "evaluation"):  # the last one is behind
        runner.segment(boundary, whole.run)
    around = ("communicators.finish_iteration", "reports.check", "reports.send_event")
    kept = ("protection.holds", "capture_extras", "protection.append")
    assert calls(whole) == [
        *("communicators.be_patient", "run", *around, *kept),
        *("communicators.be_patient", "judge_state", "run", *around, *kept),
    ]
    assert whole.entry.communicators.be_patient.call_args_list == [call(True)] * 2
    segments = [one.args[2]["boundary"] for one in whole.entry.reports.send_event.mock_calls]
    assert segments == ["evaluation", "save"]
    appended = [one.args[:2] for one in whole.entry.protection.append.mock_calls]
    assert appended == [(Generation(1, 1), "evaluation"), (Generation(1, 1), "save")]
    assert whole.entry.reports.iteration == 1


@pytest.mark.parametrize("gated", [False, True])
def test_an_iteration_takes_its_steps_in_order(
    gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one of an epoch may take long, and its time is not that of others."""
    whole = MagicMock()
    monkeypatch.setattr(epoch_runner, "dist", whole.dist)
    monkeypatch.setattr(epoch_runner, "current_device", lambda: torch.device("cpu"))
    whole.entry.protection.is_gated = gated
    runner = runner_of(whole)
    gate = [] if gated else ["protection.gate", "dist.all_reduce"]
    for iteration, is_first in ((2, True), (3, False)):
        assert runner.step(iteration, whole.run) is whole.run.return_value
        assert calls(whole) == [
            *("pause.may_start", "communicators.be_patient", "protection.announce"),
            *("built.audit.announce", "own_time.begin", "run", *gate),
            *("communicators.finish_iteration", "reports.check"),
            *([] if is_first else ["own_time.end"]),
            *("capture_extras", "protection.complete"),
            *(["loop.state_hash", "reports.check", "reports.send_event"] if is_first else []),
        ], "of every second iteration the state is hashed"
        assert whole.entry.communicators.be_patient.call_args == call(is_first)
        assert whole.entry.protection.announce.call_args == call(Generation(2, iteration))
        before = Generation(1, 1) if is_first else Generation(2, 2)
        assert whole.entry.built.audit.announce.call_args == call(iteration, before, 3)
        assert whole.entry.reports.section == ("first-step" if is_first else "step")
        assert (whole.entry.reports.iteration, whole.entry.reports.told) == (iteration, [])
        assert runner.generation == Generation(2, iteration)
        whole.reset_mock()


def test_who_is_asked_to_pause_settles_what_is_protected_first() -> None:
    whole = MagicMock()
    runner = runner_of(whole)
    whole.pause.may_start.return_value = False
    runner._stand_still_if_asked(2)
    assert calls(whole) == [
        *("pause.may_start", "protection.settle", "reports.say", "reports.wait_until")
    ]
    assert whole.entry.reports.say.call_args == call("paused", iteration=1)
    assert whole.entry.reports.section == "paused"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_checkpoint_is_announced_when_all_roles_have_written_it(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one of them; and the answer is that to this request, not to one before a recovery that
    was about the same iteration."""
    whole = MagicMock(**{"entry.boundary": "step", "entry.generation": Generation(2, 7)})
    whole.entry.program.checkpoint_directory.return_value = tmp_path
    reports = whole.entry.reports
    reports.durable_iteration = 7

    def wait_until(ready: Callable[[], bool], _: float) -> bool:
        assert not ready(), "nobody has answered yet"
        reports.durable_iteration = 7
        return ready()

    reports.wait_until = wait_until
    monkeypatch.setattr(torch.distributed, "barrier", whole.barrier)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    whole.entry.capture_extras.return_value = b""
    record = EpochRecord(2, {}, {}, Restore("memory", Generation(2, 7)))
    runner = EpochRunner(record, whole.entry, *(MagicMock() for _ in range(3)))
    runner.save(whole.loop)
    order = ["loop.save_checkpoint", "barrier", "entry.reports.say"]
    called = [name for name, *_ in whole.mock_calls if name in order]
    assert called == (order if rank == 0 else order[:2])
