"""Ways to cut and update a model survive the loss of nodes and of a process, bit for bit.

Also where NCCL answers an abort with junk, not with an error (rule 11, trap A3): after an abort a
wait of the fake ends at once, and its result is junk. So survivors continue with junk, clip by a
junk norm, find junk infinities, update, hash; none of it may be sealed, logged or written. Overlap,
virtual pipeline and experts in a pipeline are in tests/megatron_lm/test_layouts.py as well.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from deadpool_megatron.events import Event, Kind
from fake_nccl import KIND
from fake_nccl.stream_order import JUNK_LOG
from tests.faults.harness import jobs, layouts
from tests.faults.harness.jobs import Layout, Outcome, assert_unnoticed, dies, fault, reference

pytestmark = [pytest.mark.slow, pytest.mark.matrix, pytest.mark.full]
ITERATIONS = 12
GATHER = {"when_op": "all_gather_single_coalesced"}
# Lag and cadence mean that what is restored is older. Where the state is hashed, parameters are
# gathered at once: the others look at every fifth only.
SETTINGS = {
    "unlooked": (layouts.OVERLAP, "--deadpool-set hash-interval=5"),
    "lag 2, cadence 3": (layouts.OVERLAP, "--deadpool-max-lag 2 --deadpool-cadence 3"),
    "lag 2, 3+N slots": (layouts.PLAIN_OPTIMIZER, "--deadpool-max-lag 2 --deadpool-cadence 3"),
    "lag 1": (layouts.PP2_DP2, "--deadpool-max-lag 1"),
}
FAKE = f"--deadpool-communicator {KIND}"
#: events of computed values, which must be equal in all epochs
COMPUTED = (Kind.STEP, Kind.EVALUATION, Kind.STATE_HASH)
NORM = {"when_section": "optimizer", "when_op": "allreduce"}
SEND = {"when_op": "send", "when_group": "PIPELINE_MODEL_PARALLEL_GROUP"}
# At this scale the first six updates overflow. Where found-inf is junk, it says so too: the update
# is skipped, no fence is met, and only the end of the iteration stands between junk and the seal.
SCALE = "--initial-loss-scale 4194304"


COMMON = [
    dies("backward", "backward", 0, 3, when_microbatch=1),
    dies("update", "optimizer.inside", 3, 6),
    dies("before-scheduler", "optimizer.after", 1, 9, target="self"),
]


PLANS: dict[Layout, list[dict[str, Any]]] = {
    layouts.WHOLE_NODES: COMMON,
    layouts.INSTANCES: COMMON,
    layouts.PLAIN_OPTIMIZER: COMMON,
    # Data-parallel peers without the distributed optimizer have other experts, as many bytes.
    layouts.PLAIN_EXPERTS: COMMON,
    layouts.FP32: [*COMMON, dies("gather", "comm", 2, 11, **GATHER)],
    # At this scale the first updates overflow: found-inf is all that such an iteration has.
    layouts.FP16: [
        dies("in-a-skipped-update", "comm", 0, 2, when_section="optimizer", when_op="allreduce"),
        dies("after-a-skipped-update", "optimizer.after", 2, 3),
        dies("between-found-inf-and-norm", "comm.done", 1, 9, when_section="optimizer"),
    ],
    layouts.TENSOR_EXPERTS: [
        dies("between-bias-and-norm", "grads.final", 1, 3),
        dies("between-dense-and-expert-update", "optimizer.inside", 2, 6, when_optimizer=1),
        dies("after-both-updates", "optimizer.updated", 0, 9, when_optimizer=1),
    ],
}


@pytest.mark.parametrize("layout", PLANS, ids=lambda layout: layout.name)
def test_layout_survives(tmp_path, layout):
    plan = PLANS[layout]
    spares = 2 - (layout.nodes == 2)
    outcome = jobs.strike(
        tmp_path / "run", layout, ITERATIONS, plan, spares=spares, refill=len(plan)
    )
    if layout is layouts.FP16:
        assert any(step["skipped"] for step in outcome.final["steps"])


SEVERAL = [
    *COMMON,
    fault("coordinator", "coordinator.journal", when_epoch=3),
    fault("vault", "vault.seal", when_role=2, when_iteration=12),
    dies("communication", "comm", 2, 14, nth=2),
]


@pytest.mark.parametrize("name", SETTINGS)
def test_layout_survives_with_rare_checks_or_old_generations(tmp_path, name):
    layout, settings = SETTINGS[name]
    jobs.strike(tmp_path / "run", layout, 15, SEVERAL, spares=2, refill=4, settings=settings)


ABORTED = [
    dies("backward", "backward", 0, 3, when_microbatch=1),
    dies("before-norm", "comm", 3, 5, **NORM),
    # Its peers are already past their wait, and sit in .item() of the norm.
    dies("after-norm", "comm.done", 1, 7, target="self", **NORM),
    dies("parameter-gather", "comm", 2, 9, **GATHER),
    dies("pipeline-send", "comm", 0, 11, target="self", **SEND),
]


FOUND_INF = [
    dies("before-found-inf", "comm", 0, 2, **NORM),
    dies("after-found-inf", "comm.done", 2, 4, target="self", **NORM),
    dies("before-norm", "comm", 3, 8, nth=2, **NORM),
    dies("after-norm", "comm.done", 1, 10, nth=2, **NORM),
    dies("pipeline-send", "comm", 2, 12, target="self", **SEND),
]


ABORTED_PLANS: dict[Layout, tuple[list[dict[str, Any]], int, str]] = {
    # Twelve iterations as in test_layouts.py, so that they share an undisturbed run.
    layouts.PP2_DP2: (ABORTED, 12, ""),
    layouts.OVERLAP: (ABORTED, 12, ""),
    layouts.FP16: (FOUND_INF, 14, SCALE),
    layouts.VIRTUAL: (ABORTED, 12, ""),
}


@pytest.mark.parametrize(
    "layout",
    [layouts.PP2_DP2, layouts.FP16, layouts.OVERLAP, layouts.VIRTUAL],
    ids=lambda layout: layout.name,
)
def test_junk_of_a_step_is_never_stored(tmp_path, monkeypatch, layout):
    plan, iterations, flags = ABORTED_PLANS[layout]
    wanted = reference(layout, iterations, flags)
    monkeypatch.setenv(JUNK_LOG, str(tmp_path / "junk"))
    if layout is layouts.VIRTUAL:
        monkeypatch.setenv("DEADPOOL_FAKE_NCCL_UNBATCHED", "1")
    outcome = run_on_fake(tmp_path, layout, iterations, plan, flags)
    assert_unnoticed(outcome, wanted, plan)
    assert_nothing_of_junk(outcome, wanted)
    # The host did read a junk norm (or found-inf) in the optimizer, and continued.
    read = [entry for entry in junk_read(tmp_path / "junk") if "gated_step" in entry["readers"]]
    assert "allreduce" in {entry["operation"] for entry in read}


def test_junk_in_a_save_ends_no_process(tmp_path, monkeypatch):
    """Object collectives allocate by junk sizes and unpickle junk bytes: any error may come."""
    plan = [
        dies("before-objects", "save.begin", 1, 3),
        dies("between-objects", "comm", 2, 6, target="self", when_section="save", nth=2),
        dies("after-writing", "save.written", 0, 9),
    ]
    wanted = reference(layouts.PP2_DP2, 12)
    monkeypatch.setenv(JUNK_LOG, str(tmp_path / "junk"))
    saves = tmp_path / "checkpoints"
    outcome = run_on_fake(tmp_path, layouts.PP2_DP2, 12, plan, f"--save {saves} --save-interval 3")
    assert_unnoticed(outcome, wanted, plan)
    assert_nothing_of_junk(outcome, wanted)
    read = [
        entry for entry in junk_read(tmp_path / "junk") if "save_checkpoint" in entry["readers"]
    ]
    gathers = {"allgather", "all_gather_single"}  # the second since torch 2.15
    assert gathers & {entry["operation"] for entry in read}
    # One checkpoint per save, and nothing of those that were interrupted.
    assert {path.name for path in saves.glob("iter_*")} == {
        f"iter_{iteration:07d}" for iteration in (3, 6, 9, 12)
    }


def run_on_fake(
    tmp_path: Path, layout: Layout, iterations: int, plan: Sequence[Mapping[str, Any]], flags: str
) -> Outcome:
    return jobs.run_job(
        tmp_path / "run",
        layout,
        iterations,
        plan,
        spares=2,
        refill=len(plan),
        flags=flags,
        settings=FAKE,
        seconds=120,
    )


def junk_read(path: Path) -> list[dict[str, Any]]:
    """Every read of junk: the operation that left it, and the functions that were reading."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def assert_nothing_of_junk(outcome: Outcome, wanted: Outcome) -> None:
    """Assert that all reports equal those of the undisturbed run, and only the victims died."""
    truth = {place(event): event.data for event in wanted.events if event.kind in COMPUTED}
    computed = [event for event in outcome.events if event.kind in COMPUTED]
    assert computed
    for event in computed:
        assert event.data == truth[place(event)], f"{event}\n{outcome.story()}"
    assert not outcome.of_kind(Kind.STALE_DIVERGENCE), outcome.story()
    lost = [event.data for event in outcome.of_kind(Kind.MEMBER_LOST)]
    assert all("exit_code" not in data for data in lost), f"{lost}\n{outcome.story()}"


def place(event: Event) -> tuple[Kind, int | None, int | None]:
    """Return the subject of an event of a computed value."""
    return event.kind, event.role, event.iteration
