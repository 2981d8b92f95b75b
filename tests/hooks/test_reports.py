"""What an iteration reported travels with its generation, for its lines can die with a node."""

from __future__ import annotations

from typing import Any

from deadpool_megatron.hooks.reports import Reports
from deadpool_megatron.layout.records import EpochRecord, Generation, Restore, Seat
from deadpool_megatron.settings import Settings


class Link:
    """Keeps what a member sends."""

    seat = Seat(0, 0, 0)
    settings = Settings()

    def __init__(self) -> None:
        self.events: list[Any] = []

    def send_event(self, event: Any) -> None:
        self.events.append(event)


def reports_of(link: Link) -> Reports:
    reports = Reports(link, lambda epoch: None)  # type: ignore[arg-type]
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
