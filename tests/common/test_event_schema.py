"""The schema of events is complete and strict. Events of runs are checked by it as well:
tests/common/finished_run.py, tests/cluster/machine."""

import json
from datetime import datetime

import pytest

from deadpool_megatron.events import SCHEMA_VERSION, Event, Kind, parse_line, to_line
from tests.common.event_schema import SCHEMA, check_event


def test_schema_describes_every_kind_and_has_its_version():
    assert SCHEMA["properties"]["kind"]["enum"] == [str(kind) for kind in Kind]
    for kind in Kind:
        assert SCHEMA["definitions"][kind]["description"]
    assert SCHEMA["version"] == SCHEMA_VERSION


def test_event_line_has_a_date_that_may_be_missing():
    event = Event(Kind.DRAIN, 1, 0, wall_seconds=1e9 + 0.25)
    line = json.loads(to_line(event))
    check_event(line)
    assert datetime.fromisoformat(line["at"]).timestamp() == event.wall_seconds
    assert datetime.fromisoformat(line["at"]).tzinfo is not None
    older = json.dumps({key: value for key, value in line.items() if key != "at"})
    assert parse_line(older) == parse_line(to_line(event)) == event


def test_schema_refuses_unknown_events():
    warm = {"local_rank": 0, "incarnation": 0, "seconds": 1.0}
    good = Event(Kind.MEMBER_WARM, 1, 0, data=warm).to_dict()
    check_event(good)
    check_event(Event(Kind.DRAIN, 1, 0).to_dict())
    for bad in (
        {**good, "kind": "teleported"},
        {**good, "where": "mars"},
        {**good, "data": {**warm, "where": "mars"}},
        {**good, "data": {"local_rank": 0, "incarnation": 0}},
        {**good, "data": {**warm, "seconds": "1"}},
        {key: value for key, value in good.items() if key != "data"},
    ):
        with pytest.raises(AssertionError):
            check_event(bad)
