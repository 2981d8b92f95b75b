"""A session against a hand-driven agent: its answers to records and closes, at any moment."""

import threading
import time

import pytest
import torch

from deadpool_megatron.layout.records import Generation
from deadpool_megatron.wire.framing import readable
from tests.member.session_rig import ELSEWHERE, SEAT, SECONDS, drained

# The ordinary way.


def test_an_iteration_without_an_update_passes_the_gate_with_all_roles(rig, monkeypatch):
    """Otherwise another role may still need its slot; no optimizer step has passed the gate."""
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
def test_a_close_does_not_wait_for_a_member_that_builds(rig, stage):
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
    assert rig.messages("drained") == [drained(1)]


def test_a_loop_that_reports_while_it_is_built_survives_a_close(rig):
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
    events = [
        m["event"] for m in rig.messages("event") if m["event"]["kind"] in ("training", "log")
    ]
    assert [(event["kind"], event["epoch"]) for event in events] == [("training", 1)]


# Leaving a closed epoch.


@pytest.mark.parametrize("stage", ["rebuild", "restore", "sync", "verify"])
def test_a_close_in_each_stage(rig, stage):
    rig.entry.acts[stage] = rig.communicators.collective
    rig.record(1)
    while stage not in rig.entry.calls:
        time.sleep(0.001)
    rig.drain(1)
    del rig.entry.acts[stage]
    rig.record(2)
    rig.ends_well()
    assert rig.messages("drained") == [drained(1)]
    assert rig.messages("fault") == []


def test_a_step_that_ends_after_the_close_is_not_sealed(rig):
    """An aborted NCCL returns junk and raises nothing (traps, A3)."""

    def step() -> None:
        rig.close(1)
        assert rig.communicators.closed.wait(SECONDS)

    rig.entry.loop.acts[1] = step
    rig.record(1)
    assert rig.expect("drained") == drained(1)
    assert "complete" not in rig.entry.calls
    assert rig.end() is None
    assert [m for m in rig.received if m.get("event", {}).get("kind") == "state-hash"] == []


def test_closes_that_race_with_everything(rig):
    """At any moment: each epoch is answered in order, and the last epoch is trained."""
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
    assert [m["epoch"] for m in rig.messages("drained")] == list(range(1, 60)), "each exactly once"
    assert all(m["clean"] for m in rig.messages("drained"))


def test_the_close_of_a_newer_epoch_ends_the_one_that_is_played(rig):
    """This node has not received epoch 2, only its close."""
    rig.entry.loop.acts[1] = rig.communicators.collective
    rig.record(1)
    rig.expect("restored")
    rig.close(2)
    assert rig.expect("drained") == drained(2)
    assert rig.end() is None
