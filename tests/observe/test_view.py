"""One view of a run: whatever happens, all that shows it has the same words and numbers."""

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, strategies as st

from deadpool_megatron.cli import report, serve
from deadpool_megatron.cli.common import StatusPoller
from deadpool_megatron.cli.control import status as status_command
from deadpool_megatron.cli.display import Display
from deadpool_megatron.cli.metrics import metrics
from deadpool_megatron.cli.watch import Follower
from deadpool_megatron.cluster.run_directory.directory import RunDirectory
from deadpool_megatron.events import Event, Kind
from deadpool_megatron.observe.narration import Line, Narrator, label
from deadpool_megatron.observe.story import Story
from deadpool_megatron.observe.view import TABLE, TROUBLES, State, View, view
from tests.common.synthetic_run import NOTHING_WAITS, status_of

PAGES = Path(__file__).parents[2] / "docs"
FULL = os.strerror(errno.ENOSPC)
BEGAN, RUN = 1000.0, Path("/runs/first")


class Synthetic:
    """A run of two nodes with two roles each and two spares, as its coordinator knows it: events by
    a clock, the status that goes with them. Of the events ``written`` are in the files."""

    def __init__(self) -> None:
        self.now, self.events = BEGAN, list[Event]()
        self.written: int | None = None
        self.status: dict[str, Any] | None = {**status_of(2, 4), "fewer_copies": [], "epoch": 0}
        self.add(Kind.RUN_STARTED, roles=4, nodes=2, spares=2)
        for node in range(4):
            self.add(Kind.NODE_JOINED, node=node, spare=node > 1, hostname=f"b{node}")

    def add(self, kind: Kind, /, epoch: int = 1, **data: Any) -> None:
        self.now += 0.5
        fields = {name: data.pop(name) for name in ("node", "role", "iteration") if name in data}
        self.events.append(Event(kind, epoch, data=data, wall_seconds=self.now, **fields))

    def set(self, **values: Any) -> None:
        if self.status is not None:
            self.status |= values

    def do(self, action: str) -> None:
        getattr(self, action)()

    def open(self) -> None:
        self.add(Kind.EPOCH_OPENED, phases={})
        self.set(epoch=1, phase="running", failing={}, fewer_copies=[], waiting_for="")

    def step(self) -> None:
        done = sum(event.kind is Kind.STEP for event in self.events) + 1
        self.add(Kind.STEP, iteration=done, loss="0x1p+0", samples=8 * done)
        self.set(iteration=done)

    def lose_node(self) -> None:
        facts = {"cause": "connection closed", "kind": "node-lost"}
        self.add(Kind.NODE_LOST, node=1, **facts)
        self.add(Kind.EPOCH_CLOSED, node=1, **facts)
        self.set(phase="closing", failing=facts, fewer_copies=[0, 1, 2, 3])
        self.set(waiting_for="nodes [0] to say what they hold")

    def crash(self) -> None:
        facts = {"cause": "process 0 of node 1 ended: exit 1", "kind": "process-crash"}
        self.add(Kind.MEMBER_LOST, node=1, role=2, local_rank=0, incarnation=0, **facts)
        self.add(Kind.EPOCH_CLOSED, node=1, **facts)
        self.set(phase="closing", failing=facts)

    def drain(self) -> None:
        self.add(Kind.EPOCH_CLOSED, kind="planned", cause="node 1 is drained")
        self.set(phase="deciding", failing={"kind": "planned", "cause": "node 1 is drained"})

    def wait(self) -> None:
        self.add(Kind.WAITING_FOR_SPARE, text="roles [1] wait for a spare", limit_seconds=300.0)
        self.set(phase="waiting for a spare")

    def replay(self) -> None:
        self.set(phase="running")

    def recover(self) -> None:
        self.add(Kind.EPOCH_DECIDED, generation=[1, 0])
        self.open()
        self.step()
        self.add(Kind.RECOVERED, seconds=2.0, phases={}, steps_recomputed=0, exposed_seconds=1.0)

    def take_over(self) -> None:
        self.add(Kind.COORDINATOR, node=3, term=2)
        self.set(phase="bootstrapping", waiting_for="nodes [0, 1, 2] to report to it")
        self.set(fewer_copies=[0, 1, 2, 3], rpo={**status_of(2, 4)["rpo"], "most_lost": None})

    def fill_disk(self) -> None:
        if self.written is None:
            self.written = len(self.events)

    def lose_copy(self) -> None:
        self.set(fewer_copies=[3])

    def lose_spares(self) -> None:
        self.set(spares=[])

    def lose_replica(self) -> None:
        self.set(model_replicas=[7, 8])

    def stand_still(self) -> None:
        self.now += 95.0

    def lose_coordinator(self) -> None:
        self.status = None

    def end(self, status: int = 0, kind: str = "", reason: str = "") -> None:
        self.add(Kind.RUN_ENDED, exit_status=status, kind=kind, reason=reason)

    def end_badly(self) -> None:
        self.end(1)

    def end_by_bug(self) -> None:
        self.crash()
        self.end(1, "bug", "no progress after iteration 3: 2 times the same failure; process 0")

    def end_saved(self) -> None:
        self.end(75, "", "no spare; state dumped: continue with 'deadpool run --resume R'")

    def answer(self) -> dict[str, Any] | None:
        """The coordinator's answer, with what it cannot write."""
        if self.status is None:
            return None
        left = [] if self.written is None else self.events[self.written :]
        events = {**NOTHING_WAITS, "waiting": len(left), "seconds": 9.0 if left else 0.0}
        if left:
            unwritten = [event.to_dict() for event in self.events[max(0, self.written - 9) :]]  # type: ignore[operator]
            events |= {"trouble": "x", "why": FULL, "unwritten": unwritten}
        return {**self.status, "now": self.now + 1.0, "step_seconds_ago": None, "events": events}


ACTS = ("step", "lose_node", "crash", "drain", "wait", "recover", "take_over", "fill_disk")
ENDS = ("end", "end_by_bug", "end_saved", "lose_coordinator")


def shown(run: Synthetic, skew: float = 0.0) -> tuple[View, dict[str, dict[str, Any]]]:
    """The view, and what each of those that show a run has of it."""
    known = run.events if run.status is None else run.events[: run.written]
    story, page = Story(), serve.RunPage("r", RunDirectory(RUN))
    for event in known:
        story.take(event)
        page.take(event)
    status, now = run.answer(), run.now + 1.0 + skew
    seen = view(story, status, RUN, now)
    found: dict[str, dict[str, Any]] = {}
    drawn = page.to_dict(seen)
    banner = drawn["banner"]
    failures = [failure for failure in drawn["recoveries"] if not failure["planned"]]
    found["page"] = {
        **{name: banner[name] for name in ("title", "to_do", "state", "look", "spares")},
        "failed": banner["failure"] is not None,
        "iteration": drawn["iteration"],
        "survived": drawn["survived"],
        "causes": [failure["text"] for failure in failures],
        "advice": [failure["to_do"] for failure in failures],
        "kinds": sorted(failure["kind"] for failure in failures),
        "exposed": len(drawn["status"]["fewer_copies"]),
        "goodput": drawn["goodput"],
        "risk": dict(drawn["facts"]).get("lost if a node fails now (RPO)"),
    }
    lines = report.describe(RUN, seen)
    facts = report.to_dict(RUN, seen)
    failures = [failure for failure in facts["failures"] if not failure["planned"]]
    found["report"] = {
        "title": lines[0].removeprefix(f"{RUN}: ").removesuffix(f" ({seen.reason})"),
        "to_do": (lines[1] if "to do: " in lines[1] else "to do: ").split("to do: ")[1],
        **{name: facts[name] for name in ("state", "goodput")},
        "iteration": facts["last_iteration"],
        "survived": sum(failure["recovered"] for failure in failures),
        "kinds": sorted(failure["kind"] for failure in failures),
        "causes": [line.split(" ", 2)[2] for line in lines if line.startswith("failure ")],
        "advice": [failure["to_do"] for failure in failures],
    }
    found_samples = [sample for metric in metrics(seen, {}) for sample in metric.samples]
    samples = {
        ".".join((sample.name, *sample.labels.values())): sample.value for sample in found_samples
    }
    (state,) = [state for state in State if samples[f"deadpool_state.{state}"]]
    exposed = samples.get("deadpool_exposed_roles")
    named = "deadpool_failures_total."
    counted = {n.removeprefix(named): v for n, v in samples.items() if n.startswith(named)}
    found["metrics"] = {
        "state": state,
        "iteration": samples["deadpool_iteration"],
        "exposed": 0 if exposed is None else exposed,
        "goodput": samples.get("deadpool_goodput_ratio"),
        "kinds": sorted(kind for kind, n in counted.items() for _ in range(int(n))),
        "waiting": samples.get("deadpool_events_waiting", 0),
    }
    if status is not None and seen.state is not State.OVER:
        run_directory = RunDirectory(RUN)
        facts = [
            line.text.strip()
            for line in status_command.status_lines(run_directory, seen, show_all=True)
        ]
        (survived,) = [line.rpartition(" ")[2] for line in facts if "failures survived" in line]
        found["status"] = {
            "title": facts[0].split("; iteration ")[0],
            "iteration": int(facts[0].split("; iteration ")[1].split()[0].strip(";,")),
            "to_do": facts[1].removeprefix("to do: ") if facts[1].startswith("to do: ") else "",
            "survived": int(survived),
            "risk": next((t.split("(RPO): ")[1] for t in facts if "(RPO): " in t), None),
        }
        found["watch"] = watched(status, story, now)
    return seen, found


def watched(status: Mapping[str, Any], story: Story, now: float) -> dict[str, Any]:
    """What `deadpool run` and `deadpool watch` say where no events come."""
    outputs = list[str]()
    follower = Follower(RunDirectory(RUN), Mock(spec=Display, line=lambda t, s: outputs.append(t)))
    follower._story = story
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deadpool_megatron.cli.common.time.time", lambda: now)
        patch.setattr(StatusPoller, "status", lambda _: status)
        follower._poll_status(is_long_silence=True)
    (line,) = outputs
    first, _, to_do = line.split("  ", 1)[1].partition(". To do: ")
    title, _, iteration = first.rpartition("; iteration ")
    return {"title": title, "iteration": int(iteration), "to_do": to_do}


def hold(run: Synthetic, skew: float = 0.0) -> View:
    seen, found = shown(run, skew)
    story = seen.story
    failures = [failure for failure in story.all_failures if not failure.planned]
    is_open = seen.status is not None and seen.status["epoch"] and seen.state is not State.OVER
    no_epoch = seen.status is None or seen.exposed is None
    expected = {
        "state": seen.state,
        "title": seen.title,
        "to_do": seen.to_do,
        "look": seen.look,
        "spares": None if no_epoch else (len(seen.status["spares"]), 2),
        "failed": bool(failures),
        "iteration": seen.iteration,
        "survived": story.survived,
        "causes": [label(failure, story.hosts) for failure in failures],
        "advice": [seen.advice(failure) for failure in failures],
        "kinds": sorted(failure.kind for failure in failures),
        "exposed": len(seen.exposed or []),
        "goodput": story.goodput(seen.until),
        "risk": seen.at_risk() if is_open else None,
        "waiting": seen.events_waiting,
    }
    for name, values in found.items():
        for key, value in values.items():
            assert value == expected[key], (name, key, seen.state)
    return seen


@given(
    st.lists(st.sampled_from(ACTS), max_size=12),
    st.sampled_from([None, *ENDS]),
    st.sampled_from([0.0, 400.0, -400.0]),
)
def test_all_views_agree(acts, end, skew):
    run = Synthetic()
    hold(run)
    run.open()
    for act in acts:
        run.do(act)
    if end is not None:
        run.do(end)
    done = sum(event.kind is Kind.STEP for event in run.events)
    seen = hold(run, 0.0 if run.status is None else skew)
    if run.status is not None:
        assert seen.iteration == done, "also of events that are not in the files"
        assert seen.title == hold(run).title, "whatever the clock of who looks"


@pytest.mark.parametrize(
    ("acts", "state", "look", "advice"),
    [
        ((), State.RUNNING, "good", ""),
        (("fill_disk", "step"), State.RUNNING, "wait", "make room"),
        (("lose_copy",), State.RUNNING, "wait", ""),
        (("lose_spares",), State.RUNNING, "wait", "--attach"),
        (("lose_replica",), State.RUNNING, "wait", "--attach"),
        (("step", "stand_still"), State.RUNNING, "wait", f"status {RUN}"),
        (("lose_node",), State.RECOVERING, "wait", ""),
        (("lose_node", "replay"), State.RECOVERING, "wait", ""),
        (("drain",), State.PLANNED, "wait", ""),
        (("lose_node", "wait"), State.WAITING, "bad", "--attach"),
        (("lose_node", "recover"), State.RUNNING, "good", ""),
        (("take_over",), State.TAKEOVER, "wait", ""),
        (("step", "lose_coordinator"), State.UNANSWERED, "wait", f"--run-dir {RUN}"),
        (("step", "lose_coordinator", "stand_still"), State.UNANSWERED, "bad", f"--run-dir {RUN}"),
        (("end",), State.OVER, "good", ""),
        (("end_saved",), State.OVER, "wait", "continue with"),
        (("end_badly",), State.OVER, "bad", ""),
        (("end_by_bug",), State.OVER, "bad", "fix the program"),
    ],
)
def test_each_state_has_its_row(acts, state, look, advice):
    run = Synthetic()
    starting = hold(run)
    assert (starting.state, starting.look) == (State.STARTING, "")
    assert set(TABLE) == set(State)
    run.open()
    for act in acts:
        run.do(act)
    seen = hold(run)
    assert (seen.state, seen.look) == (state, look)
    assert advice in seen.to_do
    assert bool(seen.to_do) == bool(advice)
    assert seen.title.startswith(TABLE[state]["title"].partition("{")[0])


def test_view_names_a_full_run_directory_first_with_its_remedy():
    run = Synthetic()
    run.open()
    for act in ("step", "crash", "recover", "fill_disk", "step", "crash", "recover"):
        run.do(act)
    seen = hold(run)
    assert seen.title.startswith("Running; first is full since ")
    assert seen.title.endswith(": lines and page stand still, training continues")
    assert seen.to_do == f"make room on its file system ({RUN})"
    assert (seen.iteration, seen.story.survived, seen.events_waiting) == (4, 2, 7)


def test_view_names_a_bug_and_attaches_nothing_to_a_run_that_is_over():
    run = Synthetic()
    run.open()
    for act in ("crash", "recover", "lose_node", "recover", "end_by_bug"):
        run.do(act)
    seen = hold(run)
    assert [failure.kind for failure in seen.story.failures] == [
        "process-crash",
        "node-lost",
        "bug",
    ]
    assert seen.to_do.startswith("fix the program or the data first")
    assert "; process 0" in seen.reason, "all of the reason"
    assert not any("--attach" in seen.advice(failure) for failure in seen.story.failures)
    lines = list[Line]()
    narrator = Narrator(Story())
    for event in run.events:
        lines += narrator.take(event)
    assert "ended with status 1 [bug]" in lines[-2].text
    assert lines[-1].text.startswith("to do: fix the program or the data first")


def test_poller_ignores_the_answer_of_another_version(tmp_path):
    poller = StatusPoller(RunDirectory(tmp_path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StatusPoller, "status", lambda _: {**status_of(2, 4), "coordinator": None})
        assert poller.view(Story()).status is None


def test_advice_grows_with_the_number_of_failures():
    run, found = Synthetic(), list[str]()
    run.open()
    for number in range(1, 4):
        run.crash()
        if number == 3:
            run.add(
                Kind.NODE_QUARANTINED, node=1, cause="node 1 is quarantined", kind="process-crash"
            )
        run.recover()
        seen = hold(run)
        found.append(seen.advice(seen.story.failures[-1]))
    assert found[0].startswith("if it happens again")
    assert found[1].startswith("failure 2 of this kind on node 1: read the end of the log")
    assert found[2].startswith("failure 3 of this kind on node 1, which is quarantined")


def test_pages_have_the_table():
    """docs/operations.md has each state and each trouble."""
    text = (PAGES / "operations.md").read_text()
    for title in (row["title"] for row in (*TABLE.values(), *TROUBLES.values())):
        words = title.lstrip(",; ").replace("{name} {full}", "RUN is full").partition("{")[0]
        assert words.strip(" (:") in text, title


def test_view_ignores_the_clock_of_its_reader():
    run = Synthetic()
    run.open()
    run.step()
    for skew, count in ((0.0, 0), (3.0, 0), (7200.0, 1), (-400.0, 1)):
        seen = hold(run, skew)
        assert (seen.title, len(seen.notes())) == ("Running", count)
        assert seen.step_seconds_ago == pytest.approx(1.0)
