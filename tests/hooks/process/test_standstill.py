"""What a member says of its device: only once it stands still, and not with every beat."""

from __future__ import annotations

from collections.abc import Mapping

from deadpool_megatron.comms.inner import Begun, Position
from deadpool_megatron.hooks.process.standstill import Standstill


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
    standstill = Standstill(lambda: now)
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


def test_where_the_host_waits_nothing_is_said_of_a_device() -> None:
    now = 0.0
    communicators = Communicators(None)
    standstill = Standstill(lambda: now)
    for later in (0.0, 1.0, 2.0):
        now = later
        assert "device" not in standstill.look(communicators)


def test_what_the_recorder_cannot_say_costs_no_beat() -> None:
    class Silent(Communicators):
        def positions(self) -> Mapping[str, Position] | None:
            raise ValueError("another form")

    now = 0.0
    standstill = Standstill(lambda: now)
    for later in (0.0, 1.0, 2.0):
        now = later
        assert "device" not in standstill.look(Silent({}))


def test_what_the_host_has_begun_is_told_where_it_waits_itself() -> None:
    now = 0.0
    communicators = Communicators(None)
    communicators.on_host = {"tp(2,3)": Begun(4, 1), "dp(0-2:2)": Begun(9, 0)}
    standstill = Standstill(lambda: now)
    assert standstill.look(communicators) == {}
    now = 1.0
    assert standstill.look(communicators) == {"begun": [["dp(0-2:2)", 9, 0], ["tp(2,3)", 4, 1]]}
