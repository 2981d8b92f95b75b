"""The schema of events is complete and strict. Each event that a run of the tests writes is held
against it as well: tests/common/finished_run.py, tests/cluster/machine."""

import json
from datetime import datetime

import pytest

from deadpool_megatron.events import SCHEMA_VERSION, Event, Kind, parse_line, to_line
from tests.common.event_schema import SCHEMA, check_event


def test_it_describes_every_kind_and_says_its_version():
    assert SCHEMA["properties"]["kind"]["enum"] == [str(kind) for kind in Kind]
    for kind in Kind:
        assert SCHEMA["definitions"][kind]["description"]
    assert SCHEMA["version"] == SCHEMA_VERSION


def test_a_line_has_its_date_and_one_without_is_read_as_well():
    event = Event(Kind.DRAIN, 1, 0, wall_seconds=1e9 + 0.25)
    line = json.loads(to_line(event))
    check_event(line)
    assert datetime.fromisoformat(line["at"]).timestamp() == event.wall_seconds
    assert datetime.fromisoformat(line["at"]).tzinfo is not None
    older = json.dumps({key: value for key, value in line.items() if key != "at"})
    assert parse_line(older) == parse_line(to_line(event)) == event


def test_what_it_does_not_know_is_no_event():
    warm = {"slot": 0, "incarnation": 0, "seconds": 1.0}
    good = Event(Kind.MEMBER_WARM, 1, 0, data=warm).to_dict()
    check_event(good)
    check_event(Event(Kind.DRAIN, 1, 0).to_dict())
    for bad in (
        {**good, "kind": "teleported"},
        {**good, "where": "mars"},
        {**good, "data": {**warm, "where": "mars"}},
        {**good, "data": {"slot": 0, "incarnation": 0}},
        {**good, "data": {**warm, "seconds": "1"}},
        {key: value for key, value in good.items() if key != "data"},
    ):
        with pytest.raises(AssertionError):
            check_event(bad)
