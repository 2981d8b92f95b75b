"""A session that is to stand still for a while, and what it reports."""

import threading
from collections.abc import Callable

import pytest

from deadpool_megatron.cluster.link.member_link import PausePoint
from deadpool_megatron.comms import EpochClosed
from deadpool_megatron.layout.records import Generation
from tests.common.wait import wait_for
from tests.member.session_rig import ELSEWHERE, SECONDS, Rig

# The planned pause.


def pausing(rig: Rig, iteration: int) -> Callable[[], object]:
    """Have the agent's order arrive."""
    return lambda: rig.session._on_pause(iteration)


def test_stands_still_protected_and_leaves_at_the_close(rig):
    rig.entry.loop.acts[2] = pausing(rig, 2)
    rig.record(1)
    assert rig.expect("paused") == {"t": "paused", "epoch": 1, "iteration": 2}
    assert rig.entry.calls[-1] == "await_committed"
    rig.drain(1)
    rig.record(2, generation=Generation(1, 2), boundary="evaluation")
    rig.ends_well()
    assert rig.messages("pause-refused") == []


def test_goes_on_when_another_role_was_past_the_boundary(rig):
    rig.entry.loop.acts[1] = pausing(rig, 1)
    rig.record(1)
    assert rig.expect("paused")["iteration"] == 1
    rig.order("pause", epoch=1, iteration=3)
    assert rig.expect("paused")["iteration"] == 3
    rig.close(1)
    rig.expect("drained")
    assert rig.end() is None


def test_refuses_at_once_when_the_next_iteration_has_begun(rig):
    """It cannot end that iteration: the others stand still before it."""

    def step() -> None:
        rig.order("pause", epoch=1, iteration=1)
        rig.communicators.collective()

    rig.entry.loop.acts[2] = step
    rig.record(1)
    assert rig.expect("pause-refused") == {"t": "pause-refused", "epoch": 1, "iteration": 2}
    rig.close(1)
    rig.expect("drained")
    rig.entry.loop.acts.clear()
    rig.record(2, generation=Generation(1, 1))
    rig.ends_well()
    assert rig.messages("paused") == []


def test_pause_of_another_epoch_is_ignored(rig):
    """A spare receives the pause after which it takes the seat of the drained node."""
    rig.record(1, ELSEWHERE)
    rig.expect("warm")
    rig.order("pause", epoch=1, iteration=2)
    rig.close(1)
    rig.expect("drained")

    def late() -> None:
        rig.order("pause", epoch=1, iteration=3)
        rig.order("durable-done", iteration=99)  # arrives after the pause
        wait_for("both orders", lambda: rig.entry.reports.durable_iteration == 99)

    rig.entry.loop.acts[3] = late
    rig.record(2, generation=Generation(1, 2), boundary="evaluation")
    rig.ends_well()
    assert rig.messages("paused") == rig.messages("pause-refused") == []


def test_an_order_to_pause_is_obeyed_or_refused_never_lost():
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


# RoleReports.


def test_nothing_is_reported_after_a_close_nor_twice_for_people(rig, capfd):
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
    events = [message["event"] for kind in ("progress", "event") for message in rig.messages(kind)]
    assert [e["iteration"] for e in events if e["kind"] == "step"] == [1, 2, 3]
    assert [e["data"]["text"] for e in events if e["kind"] == "log"] == ["line 2", "line 3"]
    assert capfd.readouterr().out == "line 2\nline 3\n"
