"""``deadpool report``: what it tells of a run and of its failures, finished or not."""

import json
from pathlib import Path

import pytest

from deadpool_megatron.cli import report
from deadpool_megatron.events import Event, Kind, date, to_line
from deadpool_megatron.observe.view import view
from tests.common.event_schema import check_event
from tests.common.synthetic_run import events_with_fault, story_of, write_run


def test_a_failure_is_told_in_ten_lines_at_most(tmp_path, carry_out):
    run = write_run(tmp_path / "run", fault_at=6)
    status, text, _ = carry_out("report", run)
    assert status == 0
    told = text.split("failure 1 ")[1].split("\n\n")[0].splitlines()
    assert len(told) <= 10
    assert {line.split()[0] for line in told[1:]} >= {"when", "why", "state", "cost", "to"}
    for part in (
        "process 0 of node 0 -> process 0 of node 4",
        "rebuild 0.212",
        "0.899 s",
        "0.247 s",
    ):
        assert any(part in line for line in told), part
    status, text, _ = carry_out("report", run, "--json")
    facts = json.loads(text)
    assert (status, facts["exit_status"], facts["steps"]) == (0, 0, 10)
    assert facts["gate"] == {"waits": 1, "seconds": 0.04, "longest_seconds": 0.04}
    (failure,) = facts["failures"]
    assert failure["phases"]["rebuild"] == pytest.approx(0.212)
    assert (failure["generation"], failure["steps_recomputed"]) == ([1, 5], 1)
    told = {name: failure[name] for name in ("kind", "node", "host", "at")}
    assert told == {"kind": "node-lost", "node": 0, "host": "h", "at": date(1005.2)}


def test_a_run_in_the_middle_of_a_recovery(tmp_path, carry_out):
    events = events_with_fault()
    restoring = next(n for n, event in enumerate(events) if event.phase == "restore")
    lines = b"".join(map(to_line, events[:restoring])) + b'{"kind": "step", "torn'
    (tmp_path / "events.jsonl").write_bytes(lines)
    status, text, _ = carry_out("report", tmp_path)
    assert status == 0
    assert "last phase reported: rebuild" in text
    (failure,) = json.loads(carry_out("report", tmp_path, "--json")[1])["failures"]
    assert not failure["recovered"]


def test_a_hang_is_told_with_who_is_where():
    """Also one that came before the run went on."""
    world = {"group": "world(0-255)", "operation": "all_reduce", "number": 9}
    rows = [
        {"roles": [3], "where": "missing", "begun": 8, "operation": "all_gather"},
        {"roles": list(range(4, 67)), "where": "waits", "begun": 9},
    ]
    device = {"roles": [0], "where": "not-started", "begun": 5, "started": 4, "ended": 4}
    groups = [
        {**world, "rows": rows, "left_out": 192},
        {"group": "dp(0)", "operation": "", "number": 5, "rows": [device], "left_out": 0},
    ]
    hang = Event(Kind.HANG, 1, data={"roles": [3], "groups": groups, "left_out": 2})
    check_event(hang.to_dict())
    for kind in (Kind.EPOCH_CLOSED, Kind.EPOCH_OPENED):
        events = events_with_fault()
        at = next(n for n, event in enumerate(events) if event.kind is kind)
        seen = view(story_of(*events[:at], hang, *events[at:]), None, "R", 1100.0)
        text = "\n".join(report.describe_failure(seen.story.failures[0], seen))
        assert all(part in text for part in ("4-66", "192 more"))
        facts = report.to_dict(Path(), seen)["failures"][0]
        assert facts["hangs"] == [hang.data]


def test_late_messages_are_no_refusals_and_planned_changes_no_failures():
    """The loss of a coordinator, which has no phases, is a failure."""
    late = Event(Kind.REFUSED, 2, data={"who": "x", "why": "epoch 1 is not open", "late": True})
    bad = Event(Kind.REFUSED, 2, data={"who": "x", "why": "y"})
    planned = {"kind": "drained", "cause": "x", "seconds": 3.0, "phases": {"close": 2.0}}
    events = [*events_with_fault()[:-1], late, late, bad]
    for kind, at in ((Kind.EPOCH_CLOSED, 1100.0), (Kind.RECOVERED, 1103.0)):
        events.append(Event(kind, 2, data=planned, wall_seconds=at))
    for kind, data, at in (
        (Kind.COORDINATOR, {"term": 2}, 1110.0),
        (Kind.EPOCH_OPENED, {"phases": {}}, 1111.0),
    ):
        events.append(Event(kind, 2, 1, data=data, wall_seconds=at))
    seen = view(story_of(*events), None, "R", 1112.0)
    text = report.describe(Path("R"), seen)
    rows = {line.split()[0]: line.split()[1:] for line in text if line.startswith("  ")}
    assert "2 late messages of closed epochs ignored (normal after a failure)" in "\n".join(text)
    assert (rows["refused"][-1], seen.refusals) == ("1", 1)
    assert rows["phase"] == ["failures", "mean", "longest", "planned", "mean", "longest"]
    assert rows["close"] == ["1", "0.081", "0.081", "1", "2.000", "2.000"]
    assert [rows["to"][at] for at in (2, 5)] == ["2", "1"]


def test_a_damaged_event_costs_itself_alone(tmp_path, carry_out):
    run = write_run(tmp_path / "run", fault_at=6)
    slow, data = Event(Kind.SLOW_NODE, 1, node=1), {"loss": "0x1p99999"}
    huge = Event(Kind.STEP, 1, iteration=11, data=data)
    with open(run / "events.jsonl", "ab") as file:
        file.write(to_line(slow) + to_line(huge))
    status, text, errors = carry_out("report", "--json", run)
    assert (status, json.loads(text)["steps"], len(errors.splitlines())) == (0, 10, 2)
    assert carry_out("report", run)[0] == 0


def test_what_is_no_run_directory(tmp_path, carry_out):
    (tmp_path / "events.jsonl").write_text('{"kind": "no such kind"}\n')
    status, _, errors = carry_out("report", tmp_path)
    assert (status, errors) == (0, ""), "of a newer version"
