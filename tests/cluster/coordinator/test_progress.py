"""Progress: each step once, contradictions found, whatever the length of the run."""

import json
import tracemalloc
from dataclasses import replace

import pytest

from deadpool_megatron.cluster.coordinator.progress import (
    COMPARED,
    ReportedProgress,
    divergence_is_fatal,
)
from deadpool_megatron.cluster.machine import inputs
from deadpool_megatron.events import Event, Kind
from deadpool_megatron.settings import Settings


def step(iteration: int, loss: str = "0x1p+0", epoch: int = 1) -> Event:
    return Event(Kind.STEP, epoch, role=0, iteration=iteration, data={"loss": loss})


def hashed(iteration: int, role: int = 0, sha256: str = "aa", epoch: int = 1) -> Event:
    return Event(Kind.STATE_HASH, epoch, role=role, iteration=iteration, data={"sha256": sha256})


@pytest.mark.parametrize("number", ["loss", "grad_norm"])
def test_number_that_was_not_finite_may_be_replaced_and_is_fed_again(number):
    """The coordinator that received it first may have died; the right number is no divergence."""
    progress = ReportedProgress()
    good = Event(Kind.STEP, 2, role=0, iteration=5, data={"loss": "0x1p+0", "grad_norm": "0x1p+1"})
    bad = replace(good, epoch=1, data={**good.data, number: "nan"})
    for _ in range(2):
        event, item = progress.take(bad)
        assert event is bad
        assert isinstance(item, inputs.NotFinite)
    assert progress.take(good) == (good, inputs.StepReported(2, 5))
    assert progress.take(replace(good, epoch=3)) == (None, None)
    assert not progress.diverged


@pytest.mark.parametrize(("is_fatal", "status"), [(True, 3), (False, 0)])
def test_other_numbers_are_a_divergence(is_fatal, status):
    """It decides the exit status, unless it is only reported."""
    progress = ReportedProgress(is_fatal)
    progress.take(step(1))
    event, item = progress.take(step(1, loss="0x1.8p+0", epoch=2))
    assert event is not None
    assert event.kind is Kind.STALE_DIVERGENCE
    assert event.data["first"] == {"loss": "0x1p+0"}
    assert isinstance(item, inputs.Diverged) is is_fatal
    assert progress.final({}, "", 0)["exit_status"] == status
    assert progress.final({}, "broken", 1)["exit_status"] == 1, "another failure is not hidden"


@pytest.mark.parametrize(
    ("settings", "fatal"),
    [
        (Settings(), True),  # decided: no GPU was seen
        (Settings(communicator="fake_nccl:FakeNcclFabric"), True),
        (Settings(communicator="nccl"), False),
        (Settings(communicator="nccl", divergence="stop"), True),
        (Settings(divergence="report"), False),
    ],
)
def test_divergence_is_fatal_by_setting_and_communicator(settings, fatal):
    assert divergence_is_fatal(settings) is fatal


def test_state_hashes_are_compared_role_by_role():
    progress = ReportedProgress()
    for role, sha256 in enumerate(("aa", "bb", "bb")):
        progress.take(hashed(4, role, sha256))
    assert not progress.diverged
    event, _ = progress.take(hashed(4, 1, "cc"))
    assert event is not None
    assert event.kind is Kind.STALE_DIVERGENCE


def test_compared_numbers_do_not_grow_with_the_run():
    progress = ReportedProgress()
    tracemalloc.start()
    try:
        for k in range(1, 12_001):
            progress.take(step(k))
            progress.take(hashed(k))
            if k == 4_000:
                tracemalloc.reset_peak()
                before, _ = tracemalloc.get_traced_memory()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # 8,000 iterations are megabytes. Memory of threads of other tests counts, too.
    assert peak - before < 400_000
    assert progress.take(step(12_000 - COMPARED[Kind.STEP] + 1)) == (None, None), "it is known yet"
    assert len(json.dumps(progress.final({}, "", 0))) < 1000


def test_numbers_of_discarded_iterations_are_forgotten():
    progress = ReportedProgress()
    for k in (1, 2, 3):
        progress.take(step(k))
        progress.take(hashed(k))
    progress.forget(3)
    assert progress.last_iteration == 2
    progress.take(hashed(3, sha256="bb", epoch=2))
    assert not progress.diverged
