"""The time of one's own, and what is said of a device: only once it stands still."""

from collections.abc import Mapping

import pytest

from deadpool_megatron.comms import StreamWaits
from deadpool_megatron.comms.in_flight.device_time import CudaClock
from deadpool_megatron.comms.inner import Begun, Position
from deadpool_megatron.hooks.reports import DeviceMeter, HangProbe


class ScriptedClock(CudaClock):
    """A device that comes to each mark after ``lag`` more seconds than its stream is long."""

    def __init__(self) -> None:
        self.now = self.device = 0.0
        self.marks = 0
        self.captures = False

    def is_recorded(self) -> bool:
        return self.captures

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


def test_what_a_graph_captures_is_not_marked() -> None:
    """The mark would be one of each replay, and who asks for it fails."""
    role = Role()
    role.clock.captures = True
    role.iteration(3.0, 5.0)
    assert (role.waits.count, role.clock.now) == (0, 8.0)


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


class Communicators:
    def __init__(self, found: Mapping[str, Position] | None) -> None:
        self.found, self.finished, self.asked = found, 7, 0
        self.looked = 0
        self.on_host: dict[str, Begun] = {}

    def progress(self) -> int:
        return self.finished

    def look(self) -> None:
        self.looked += 1

    def positions(self) -> Mapping[str, Position] | None:
        self.asked += 1
        return self.found

    def begun(self) -> Mapping[str, Begun]:
        return self.on_host


def test_the_recorder_is_asked_once_a_second_of_a_standstill() -> None:
    now = 100.0
    communicators = Communicators({"dp(0,1)": Position(5, 5, 4)})
    standstill = HangProbe(lambda: now)
    told = {"begun": [], "device": [["dp(0,1)", 5, 5, 4, True]]}
    assert standstill.look(communicators) == {}
    now = 100.9
    assert standstill.look(communicators) == {}
    assert communicators.asked == 0
    for later in (101.0, 101.1, 101.9):
        now = later
        assert standstill.look(communicators) == told
    assert communicators.asked == communicators.looked == 1
    communicators.finished += 1
    assert standstill.look(communicators) == {}, "it goes on"


class Silent(Communicators):
    def positions(self) -> Mapping[str, Position] | None:
        raise ValueError("another form")


@pytest.mark.parametrize("communicators", [Communicators(None), Silent({})])
def test_where_the_host_waits_or_the_recorder_is_mute_nothing_is_said_of_a_device(
    communicators: Communicators,
) -> None:
    now = 0.0
    standstill = HangProbe(lambda: now)
    for later in (0.0, 1.0, 2.0):
        now = later
        assert "device" not in standstill.look(communicators)  # type: ignore[arg-type]


def test_what_the_host_has_begun_is_told_where_it_waits_itself() -> None:
    now = 0.0
    communicators = Communicators(None)
    communicators.on_host = {"tp(2,3)": Begun(4, 1), "dp(0-2:2)": Begun(9, 0)}
    standstill = HangProbe(lambda: now)
    assert standstill.look(communicators) == {}
    now = 1.0
    assert standstill.look(communicators) == {"begun": [["dp(0-2:2)", 9, 0], ["tp(2,3)", 4, 1]]}
