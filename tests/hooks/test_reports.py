"""What an iteration reported travels with its generation, for its lines can die with a node."""

import math
from typing import Any

import pytest

from deadpool_megatron.comms import EpochClosed
from deadpool_megatron.hooks.reports import RoleReports
from deadpool_megatron.layout.records import EpochRecord, Generation, Restore, Seat
from deadpool_megatron.settings import Settings


class Link:
    """Keeps what a member sends."""

    seat = Seat(0, 0, 0)

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self.events: list[Any] = []
        self.said: list[Any] = []

    def send(self, message: Any) -> None:
        self.said.append(message)

    def send_event(self, event: Any) -> None:
        self.events.append(event)


def reports_of(link: Link, closed: bool = False) -> RoleReports:
    def check(epoch: int) -> None:
        if closed:
            raise EpochClosed(epoch, "the test")

    reports = RoleReports(link, check)  # type: ignore[arg-type]
    reports.record = EpochRecord(1, {}, {}, Restore("initial", Generation(1, 0)))
    return reports


def test_a_restored_generation_is_reported_again() -> None:
    lost, survivor = Link(), Link()
    first = reports_of(lost)
    first.emit("step", {"iteration": 3, "loss": "0x1p+1"})
    first.emit("log", {"level": "info", "text": "for people, once"})
    first.emit("evaluation", {"iteration": 3, "loss": "0x1p+2"})
    second = reports_of(survivor)
    second.tell_again(first.told)
    wanted = [e for e in lost.events if e.kind != "log"]
    assert [(e.kind, e.iteration, e.data) for e in survivor.events] == [
        (e.kind, e.iteration, e.data) for e in wanted
    ]
    assert second.told == first.told


def test_every_role_goes_no_further_than_its_own_gradient_norm() -> None:
    link = Link()
    reports = reports_of(link, closed=True)
    reports.role, reports.iteration = 2, 9
    reports.judge("gradient norm", 3.5)
    assert not link.said
    with pytest.raises(EpochClosed):
        reports.judge("gradient norm", math.nan)
    told = {"t": "not-finite", "epoch": 1, "role": 2, "iteration": 9}
    assert link.said == [{**told, "number": "gradient norm", "value": "nan"}]
    reports.record = None
    reports.judge("gradient norm", math.nan)  # a spare that warms up
    reports = reports_of(Link(Settings(nonfinite="ignore")), closed=True)
    reports.judge("gradient norm", math.nan)


def test_who_waits_at_the_gate_is_in_a_section_of_its_own() -> None:
    """Or it would hang in its step, and nobody would be any better in its place."""
    reports = reports_of(Link())
    reports.section = "step"
    for seconds in (5.0, 10.0):
        reports.report_wait(Generation(1, 3), seconds, over=False)
        assert reports.section == "gate"
    reports.report_wait(Generation(1, 3), 12.0, over=True)
    assert reports.section == "step"
    reports.report_wait(Generation(1, 4), 0.02, over=True)
    assert reports.section == "step"
