"""What a role needs of its own, where waits hold a stream: measured seldom, read when over."""

from __future__ import annotations

import pytest

from deadpool_megatron.comms import StreamWaits
from deadpool_megatron.comms.in_flight import stream_waits
from deadpool_megatron.comms.in_flight.stream_waits import DeviceClock
from deadpool_megatron.hooks.process.own_time import DeviceMeter


class ScriptedClock(DeviceClock[float]):
    """A device that comes to each mark after ``lag`` more seconds than its stream is long."""

    def __init__(self) -> None:
        self.now = self.device = 0.0
        self.marks = 0

    def mark(self) -> float:
        self.marks += 1
        return self.now

    def is_passed(self, mark: float) -> bool:
        return mark <= self.device

    def seconds(self, earlier: float, later: float) -> float:
        return later - earlier

    def forget(self, mark: float) -> None:
        self.marks -= 1


class Role:
    def __init__(self) -> None:
        self.clock = ScriptedClock()
        self.waits = StreamWaits()
        self.waits.clock = self.clock
        self.stalled = 0.0
        self.meter = DeviceMeter(self.waits, lambda: self.stalled)

    def iteration(self, work: float, wait: float, *, waits: int = 1, stall: float = 0.0) -> None:
        self.meter.begin()
        self.clock.now += work
        for _ in range(waits):
            self.waits.around(lambda: self.pass_time(wait / waits))
        self.clock.now += stall
        self.stalled += stall
        self.meter.end()

    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds


def test_waits_and_stalls_are_not_the_roles_own() -> None:
    role = Role()
    role.iteration(3.0, 5.0, stall=0.5)
    role.clock.device = role.clock.now
    role.iteration(4.0, 1.0)
    role.clock.device = role.clock.now
    role.meter.begin()
    assert role.meter.sample == (2, pytest.approx(7.0))


def test_nothing_is_read_before_the_device_is_there_and_nothing_measured_meanwhile() -> None:
    role = Role()
    role.iteration(3.0, 5.0)
    for _ in range(3):
        role.iteration(100.0, 100.0)
    assert role.meter.sample == (0, 0.0)
    role.clock.device = role.clock.now
    role.iteration(4.0, 1.0)
    assert role.meter.sample == (1, pytest.approx(3.0))


def test_marks_take_no_more_than_a_thousandth_of_training() -> None:
    role = Role()
    for _ in range(100):
        role.iteration(0.5, 0.5, waits=1000)  # 10 ms of marks where one is allowed in 1 s
        role.clock.device = role.clock.now
    assert 9 <= role.meter.sample[0] <= 11
    assert role.clock.marks < 4000, "marks are used again"


def test_a_new_epoch_forgets_what_an_old_one_measured() -> None:
    role = Role()
    role.iteration(3.0, 5.0)
    role.meter.reset()
    role.clock.device = role.clock.now
    role.iteration(4.0, 1.0)
    role.clock.device = role.clock.now
    role.meter.begin()
    assert role.meter.sample == (1, pytest.approx(4.0))


def test_after_an_iteration_of_too_many_waits_others_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream_waits, "MOST_WAITS", 3)
    role = Role()
    role.iteration(3.0, 5.0, waits=4)
    role.clock.device = role.clock.now
    # What the marks of the first one cost is measured too: the next comes when that is little.
    for _ in range(10):
        role.iteration(3.0, 5.0)
        role.clock.device = role.clock.now
    role.meter.begin()
    assert role.meter.sample[0] > 0
