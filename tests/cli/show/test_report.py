"""``deadpool report``: the story of failures from events, finished or not."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from synthetic_run import events_of, write_run

from deadpool_megatron.cli.show import report
from deadpool_megatron.cli.show.narration import ADVICE, describe_loss
from deadpool_megatron.cli.show.story import Story, summary
from deadpool_megatron.cluster.failures import FailureKind
from deadpool_megatron.events import Event, EventLog, Kind, to_line
from tests.cli.told import CarryOut, Complain
from tests.common.event_schema import check_event


def story_of(events: list[Event]) -> Story:
    story = Story()
    for event in events:
        story.add(event)
    return story


def struck_events() -> list[Event]:
    return list(events_of(10, 6, 0.0, began=1000.0))


def test_a_failure_is_told_in_ten_lines_at_most(tmp_path: Path, carry_out: CarryOut) -> None:
    status, text, _ = carry_out("report", write_run(tmp_path / "run", strike=6))
    assert status == 0
    told = text.split("Failure 1: ")[1].split("\n\n")[0].splitlines()
    assert len(told) <= 10
    assert told[0] == "a node was lost: node 0: connection closed"
    assert "after iteration 5," in told[1]
    for part in (
        "of iteration 5 (computed in epoch 1)",
        "role 0: node 0 slot 0 -> node 4 slot 0",
        "rebuild 0.212",
        "why      the connection to its agent ended",
        "1 step computed again",
        "0.899 s until the next step",
        "0.247 s without all copies",
        "to do    look whether the host is up",
    ):
        assert any(part in line for line in told), part
    assert "ended with exit status 0" in text
    assert "1 wait, 0.040 s over all roles, the longest 0.040 s (role 2, iteration 3)" in text


def test_every_kind_of_failure_has_a_reason_and_what_to_do() -> None:
    planned = {FailureKind.DRAINED, FailureKind.COORDINATOR, FailureKind.RESTART}
    assert ADVICE.keys() == set(FailureKind)
    assert {kind for kind, advice in ADVICE.items() if not advice.to_do} == planned


def test_json_holds_the_same_facts(tmp_path: Path, carry_out: CarryOut) -> None:
    status, text, _ = carry_out("report", write_run(tmp_path / "run", strike=6), "--json")
    facts = json.loads(text)
    assert status == 0
    assert facts["steps"] == 10
    assert facts["exit_status"] == 0
    (failure,) = facts["failures"]
    assert failure["phases"]["rebuild"] == pytest.approx(0.212)
    assert failure["generation"] == [1, 5]
    assert failure["steps_recomputed"] == 1


def test_a_run_without_failures(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    text = "\n".join(report.describe(run, report.read_story(run), None))
    assert "Failure" not in text
    assert "seconds per step: mean 0.400" in text


def test_a_run_in_the_middle_of_a_recovery(tmp_path: Path, carry_out: CarryOut) -> None:
    events = struck_events()
    rebuilding = next(
        number for number, e in enumerate(events) if e.kind is Kind.PHASE and e.phase == "restore"
    )
    log = EventLog(tmp_path / "events.jsonl")
    for event in events[:rebuilding]:
        log.append(to_line(event))
    log.close()
    with open(tmp_path / "events.jsonl", "a") as file:
        file.write('{"kind": "step", "torn')
    status, text, _ = carry_out("report", tmp_path)
    assert status == 0
    assert "last phase heard of: rebuild" in text
    assert "it was killed as a whole" in text


def test_step_times_leave_out_the_struck_step() -> None:
    story = story_of(struck_events())
    assert len(story.step_seconds()) == 8
    assert max(story.step_seconds()) < 0.41


def test_a_failure_during_a_recovery_is_the_same_failure() -> None:
    events = struck_events()
    opened = next(n for n, e in enumerate(events) if e.kind is Kind.EPOCH_OPENED)
    second = [
        Event(Kind.MEMBER_LOST, epoch=2, node=3, role=6, data={"slot": 0, "signal": 9}),
        Event(Kind.EPOCH_CLOSED, epoch=2, data={"cause": "node 3 slot 0 lost"}),
    ]
    story = story_of(events[:opened] + second + events[opened:])
    (failure,) = story.failures
    assert failure.closes == 2
    assert describe_loss(failure.losses[-1]) == "node 3 slot 0 with role 6 (signal 9)"
    text = "\n".join(report.describe_failure(failure, story))
    assert "struck 2 times before the run went on" in text


def test_a_hang_is_told_with_who_is_where() -> None:
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
    events = struck_events()
    closed = next(n for n, e in enumerate(events) if e.kind is Kind.EPOCH_CLOSED)
    opened = next(n for n, e in enumerate(events) if e.kind is Kind.EPOCH_OPENED)
    said = [Event(Kind.NCCL_REPORT, 1, n, data={"log": f"node{n}-nccl-1.log"}) for n in range(6)]
    for at in (closed, opened):
        story = story_of([*events[:at], hang, events[at], *said, *events[at + 1 :]])
        (failure,) = story.failures
        text = "\n".join(report.describe_failure(failure, story))
        assert all(part in text for part in ("4-66", "192 more", "node3-nccl-1.log; and 2 more"))
        facts = report.to_dict(Path(), story, None)["failures"][0]
        assert facts["hangs"] == [hang.data]
        assert facts["nccl_logs"] == [f"node{n}-nccl-1.log" for n in range(6)]


def test_a_lost_spare_is_not_the_cause_of_a_later_failure() -> None:
    events = struck_events()
    spare = Event(Kind.NODE_LOST, epoch=1, node=4, wall_seconds=1001.5)
    story = story_of([events[0], spare, *events[1:]])
    assert [loss.node for loss in story.failures[0].losses] == [0]
    assert [loss.node for loss in story.unrelated_losses] == [4]


def test_a_drain_is_a_planned_swap() -> None:
    events = [e for e in struck_events() if e.kind is not Kind.NODE_LOST]
    closed = next(n for n, e in enumerate(events) if e.kind is Kind.EPOCH_CLOSED)
    told = {**events[closed].data, "kind": FailureKind.DRAINED}
    events[closed] = replace(events[closed], data=told)
    story = story_of(events)
    title, *facts = report.describe_failure(story.failures[0], story)
    assert title == f"Planned swap 1: {story.failures[0].cause}"
    assert not any(line.lstrip().startswith("lost") for line in facts), "nothing is"
    assert report._phase_table(story.failures)[0].split() == ["phase", "swap", "1"]


def test_a_wait_reported_twice_counts_once() -> None:
    wait = [
        Event(Kind.GATE_WAIT, epoch=1, role=0, iteration=3, data={"seconds": s}) for s in (5.0, 7.5)
    ]
    assert sum(story_of(wait).gate_waits.values()) == 7.5


def test_many_failures_share_a_table_of_means() -> None:
    story = Story()
    for number in range(8):
        for event in events_of(10, 6, 0.0, began=1000.0 + 100 * number):
            story.add(event)
    lines = report.describe(Path("x"), story, None)
    table = lines[lines.index("Seconds in each phase") + 1 :]
    assert table[0].split() == ["phase", "failures", "mean", "longest"]
    assert table[2].split() == ["detect", "8", "0.012", "0.012"]


def test_a_damaged_event_costs_itself_alone(tmp_path: Path, carry_out: CarryOut) -> None:
    run = write_run(tmp_path / "run", strike=6)
    whole = json.loads(carry_out("report", "--json", run)[1])
    slow, huge = Event(Kind.SLOW_NODE, 1, node=1), Event(Kind.STEP, 1, iteration=10**30)
    with open(run / "events.jsonl", "ab") as file:
        file.write(to_line(slow) + to_line(huge))
    status, text, errors = carry_out("report", "--json", run)
    assert (status, json.loads(text)["steps"]) == (0, whole["steps"])
    told = set(errors.splitlines())
    assert len([line for line in told if " is skipped: " in line]) == len(told) == 2
    assert carry_out("report", run)[0] == 0


def test_what_is_no_run_directory(tmp_path: Path, complain: Complain, carry_out: CarryOut) -> None:
    assert "is not the directory of a run" in complain("report", tmp_path)
    (tmp_path / "events.jsonl").write_text('{"kind": "no such kind"}\n')
    status, _, errors = carry_out("report", tmp_path)
    assert (status, errors) == (0, ""), "of a newer version"


def test_summary_is_untrimmed_and_by_nearest_rank() -> None:
    assert summary([]) == {"count": 0}
    values = [float(n) for n in range(1, 101)]
    found = summary([*values, 1000.0])
    assert found["p50"] == 51.0
    assert found["p99"] == 100.0
    assert found["max"] == 1000.0
    assert math.isclose(found["mean"], (5050 + 1000) / 101)


def test_a_run_that_is_started_again_has_not_ended(tmp_path: Path) -> None:
    """It ended with its state in memory, was started again, and has lost a node since."""
    first = list(events_of(3, None, 0.0, began=1000.0))
    joined = Event(Kind.NODE_JOINED, 1, 0, data={"spare": False}, wall_seconds=1100.0)
    lost = Event(Kind.NODE_LOST, 1, 0, data={"cause": "gone"}, wall_seconds=1101.0)
    closed = Event(Kind.EPOCH_CLOSED, 1, data={"cause": "gone"}, wall_seconds=1101.0)
    story = story_of([*first, joined, lost, closed])
    assert [loss.node for loss in story.failures[0].losses] == [0]
    assert "exit status" not in report.state_of(tmp_path, story, None)


def test_a_recovery_of_which_nobody_tells_the_end_is_over_all_the_same() -> None:
    """Its coordinator was lost behind the opening, and the next one knows of no recovery."""
    events = [e for e in struck_events() if e.kind not in (Kind.RECOVERED, Kind.RUN_ENDED)]
    story = story_of(events)
    assert story.current is None
    (failure,) = story.failures
    assert failure.recovery is not None
    assert failure.recovery.seconds == pytest.approx(0.899, abs=0.02)  # but for the detection
    assert failure.recovery.steps_recomputed == 0
    later = Event(Kind.EPOCH_CLOSED, 2, data={"cause": "again"}, wall_seconds=1100.0)
    story.add(later)
    assert [one.closes for one in story.failures] == [1, 1]


def test_a_coordinator_on_another_host_is_not_looked_for_here(tmp_path: Path) -> None:
    """As on a login node: nothing is known of processes elsewhere."""
    run = write_run(tmp_path / "run", strike=6)
    (run / "final.json").unlink()
    place = {"host": "10.0.0.1", "port": 1, "pid": 2**22 + 1, "hostname": "b7", "started": {}}
    (run / "coordinator.json").write_text(json.dumps(place))
    story = story_of([e for e in struck_events() if e.kind is not Kind.RUN_ENDED])
    state = report.state_of(run, story, None)
    assert state == "running, as far as its events tell: its coordinator was last on host b7"


def test_a_failure_behind_a_drain_that_did_not_come_about_is_no_planned_swap() -> None:
    drain = Event(Kind.DRAIN, 1, 0, wall_seconds=1000.0)
    closed = Event(Kind.EPOCH_CLOSED, 1, data={"kind": "hang", "cause": "x"}, wall_seconds=9000.0)
    (failure,) = story_of([drain, closed]).failures
    assert not failure.planned
