"""Results: each step once, contradictions found, whatever the length of the run."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest

from deadpool_megatron.cluster.coordinator.reporting import run_files
from deadpool_megatron.cluster.coordinator.reporting.results import (
    COMPARED_STEPS,
    Results,
    divergence_is_fatal,
)
from deadpool_megatron.cluster.coordinator.reporting.run_files import RunFiles
from deadpool_megatron.cluster.machine.actions import Finish
from deadpool_megatron.cluster.machine.state.blame import Blame
from deadpool_megatron.cluster.machine.state.recoveries import Recoveries
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, RunInfo, write_json
from deadpool_megatron.events import Event, Kind, read_events
from deadpool_megatron.layout.records import Generation, Restore
from deadpool_megatron.settings import Settings
from tests.cluster.machine.rig import Rig


def step(iteration: int, loss: str = "0x1p+0", epoch: int = 1) -> Event:
    return Event(Kind.STEP, epoch, role=0, iteration=iteration, data={"loss": loss})


def test_repeated_step_is_dropped() -> None:
    results = Results()
    assert len(results.add(step(1))) == 1
    assert results.add(step(1, epoch=2)) == []
    assert results.last_iteration == 1
    assert not results.diverged


@pytest.mark.parametrize("number", ["loss", "grad_norm"])
def test_the_right_number_after_one_that_was_not_finite_is_no_divergence(number: str) -> None:
    results, good = Results(), {"loss": "0x1p+0", "grad_norm": "0x1p+1", "skipped": False}
    results.add(Event(Kind.STEP, 1, role=0, iteration=1, data={**good, number: "nan"}))
    again = Event(Kind.STEP, 2, role=0, iteration=1, data=good)
    assert results.add(again) == [again]
    assert results.add(replace(again, epoch=3)) == []
    assert not results.diverged


def test_other_numbers_are_a_divergence_and_decide_the_exit_status() -> None:
    results = Results()
    results.add(step(1))
    (event,) = results.add(step(1, loss="0x1.8p+0", epoch=2))
    assert event.kind is Kind.STALE_DIVERGENCE
    assert event.data["first"] == {"loss": "0x1p+0"}
    final = results.final({}, "", 0)
    assert final["exit_status"] == 3
    assert "other numbers" in final["reason"]


def test_a_divergence_that_is_only_reported_leaves_the_exit_status_alone() -> None:
    results = Results(fatal_divergence=False)
    results.add(step(1))
    (event,) = results.add(step(1, loss="0x1.8p+0", epoch=2))
    assert event.kind is Kind.STALE_DIVERGENCE
    assert results.diverged
    assert results.final({}, "", 0)["exit_status"] == 0


@pytest.mark.parametrize(
    ("settings", "fatal"),
    [
        (Settings(), True),  # decided: no GPU was seen
        (Settings(communicator="gloo"), True),
        (Settings(communicator="fake_nccl:FakeNcclFabric"), True),
        (Settings(communicator="nccl"), False),
        (Settings(communicator="nccl", divergence="stop"), True),
        (Settings(divergence="report"), False),
    ],
)
def test_where_a_divergence_ends_a_run(settings: Settings, fatal: bool) -> None:
    assert divergence_is_fatal(settings) is fatal


def test_divergence_does_not_hide_another_failure() -> None:
    results = Results()
    results.add(step(1))
    results.add(step(1, loss="nan"))
    assert results.final({}, "broken", 1)["exit_status"] == 1


def test_state_hashes_are_compared_role_by_role() -> None:
    def hashed(role: int, sha256: str) -> Event:
        return Event(Kind.STATE_HASH, role=role, iteration=4, data={"sha256": sha256})

    results = Results()
    results.add(hashed(0, "aa"))
    results.add(hashed(1, "bb"))
    assert not results.diverged
    assert results.add(hashed(1, "cc"))[0].kind is Kind.STALE_DIVERGENCE


def info() -> RunInfo:
    return RunInfo("ab", 1, 1, 0, 1, ("x.py",), Settings(), "/dev/shm/deadpool-ab")


def test_each_term_has_a_file_of_its_own(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    first = RunFiles(run, info(), 1)
    first.write(step(1))
    first.write(step(2))
    first.close(10.0)
    with open(run.events, "a") as file:
        file.write('{"kind":"step","iter')
    second = RunFiles(run, info(), 2, newest=2)
    assert second.results.last_iteration == 2
    second.write(step(3))
    state = Rig().state._replace(recoveries=Recoveries(count=7, steps_recomputed=3))
    second.write_result(Finish(0, ""), state, second.result(Finish(0, ""), state))
    second.close(10.0)
    assert [event.iteration for event in read_events(run.events)] == [1, 2, 3]
    assert sorted(path.name for path in tmp_path.glob("events*")) == [
        "events-0002.jsonl",
        "events.jsonl",
    ]
    final = json.loads(run.final.read_text())
    assert (final["iterations"], final["recovery_count"], final["steps_recomputed"]) == (3, 7, 3)


async def test_a_cleaner_that_takes_the_run_file_does_not_hide_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_files, "_PAUSE_SECONDS", 0.01)
    run = RunDirectory(tmp_path / "run")
    whole = replace(info(), run_id="0123abcd")
    run.create(whole)
    files = run_files.RunFiles(run, whole, 1)
    keeping = asyncio.create_task(files.keep_name())
    async with asyncio.timeout(20):
        await asyncio.sleep(0.05)
        (run.path / "run.json").unlink()
        while not (run.path / "run.json").exists():
            await asyncio.sleep(0.01)
    keeping.cancel()
    assert run.read_run() == whole
    files.close(10.0)


@pytest.mark.parametrize(("saved_at", "is_named"), [(4, True), (5, False)])
def test_a_checkpoint_that_must_not_be_used_is_not_named_at_the_end(
    tmp_path: Path, saved_at: int, is_named: bool
) -> None:
    """The loss of iteration 5 was not finite, and nothing of before it was left."""
    run = RunDirectory(tmp_path)
    files = RunFiles(run, info(), 1)
    named = Restore("durable", Generation(1, saved_at), path=str(tmp_path))
    write_json(run.latest, named.to_dict())
    state = Rig().state._replace(blame=Blame(poisoned_from=5))
    for _ in range(2):  # tried again after an error of the disk
        files.write_result(Finish(4, "not finite"), state, {})
    files.close(10.0)
    assert run.latest.exists() is is_named
    assert run.final.exists()


def test_what_is_compared_does_not_grow_with_the_run() -> None:
    results = Results()
    tracemalloc.start()
    try:
        for k in range(1, 12_001):
            results.add(step(k))
            hashed = Event(Kind.STATE_HASH, role=0, iteration=k, data={"sha256": "a" * 64})
            results.add(hashed)
            if k == 4_000:
                tracemalloc.reset_peak()
                before, _ = tracemalloc.get_traced_memory()
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # 8,000 iterations are megabytes. What threads of other tests have taken meanwhile counts, too.
    assert most - before < 400_000
    assert results.add(step(12_000 - COMPARED_STEPS + 1)) == [], "it is known yet"
    assert len(json.dumps(results.final({}, "", 0))) < 1000


def test_a_loss_that_was_not_finite_may_be_replaced_and_is_passed_on_again() -> None:
    results = Results()
    bad = replace(step(5), data={**step(5).data, "loss": "nan"})
    assert results.add(bad) == [bad]
    assert results.add(bad) == [bad], "the coordinator that heard it first may have died"
    assert len(results.add(step(5))) == 1
    assert results.add(step(5)) == []
    assert not results.diverged


def test_numbers_of_iterations_that_were_thrown_away_are_forgotten() -> None:
    results = Results()
    for k in (1, 2, 3):
        results.add(step(k))
        results.add(Event(Kind.STATE_HASH, 1, role=0, iteration=k, data={"sha256": "a"}))
    results.add(Event(Kind.EPOCH_DECIDED, 2, data={"forgotten_from": 3}))
    assert results.last_iteration == 2
    results.add(Event(Kind.STATE_HASH, 2, role=0, iteration=3, data={"sha256": "b"}))
    assert not results.diverged


def test_what_is_saved_counts_though_nobody_has_told_of_it(tmp_path: Path) -> None:
    """The node that told the numbers was lost with its coordinator."""
    files = RunFiles(RunDirectory(tmp_path), info(), 2)
    end = Finish(75, "no spare", Restore("dump", Generation(1, 10), path="/dump/1-10"))
    assert files.result(end, Rig().state)["iterations"] == 10
    files.close(10.0)


def test_events_of_a_writer_in_the_middle_of_a_line(tmp_path: Path) -> None:
    """The rest of a line that arrives while it is read is not taken for a line."""
    run = RunDirectory(tmp_path)
    files = RunFiles(run, info(), 1)
    for iteration in range(1, 3000):
        files.write(step(iteration))
    files.close(10.0)
    whole = run.events.read_bytes()
    run.events.write_bytes(whole[:-40])
    reading = read_events(run.events)
    next(reading)
    with open(run.events, "ab") as file:
        file.write(whole[-40:])
    assert [event.iteration for event in reading][-1] in (2998, 2999)
