"""The fault matrix: every phase of an iteration x every kind of victim, in chained runs.

Each chain is one job that takes several faults; after every iteration the state of all roles is
held against the undisturbed run. A cell that fails is named by the first difference.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.faults.harness import cells as harness, jobs
from tests.faults.harness.jobs import Layout, Outcome, restart_kinds
from tests.faults.harness.layouts import PP2_DP2, TP2_PP2_DP2

pytestmark = [pytest.mark.slow, pytest.mark.matrix]
CHAIN_LENGTH = 9
EVALUATION = f"--eval-interval {harness.EVALUATION_INTERVAL} --eval-iters 1"


@dataclass(frozen=True)
class Scheme:
    """A scheme other than buddy. ``proof``: the event of a lost node's role restored by it.
    ``target``: the victim where an array has a node. ``shift``: the offset of the victims' order.
    """

    flags: str
    shift: int = 0
    proof: str = ""
    target: str = "node"


SCHEMES = {
    "buddy": Scheme("buddy"),
    "parity": Scheme("parity --deadpool-parity-group 3", 1, "decoded"),
    # They survive whatever happens to processes, not a lost node: that is in schemes/test_local.py.
    "local": Scheme("local", target="members"),
    "local-twice": Scheme("local-twice", 1, target="members"),
}


def strike(
    tmp_path: Path,
    layout: Layout,
    part: list[harness.Cell],
    plan: list[dict[str, object]],
    iterations: int,
    settings: str = "",
) -> Outcome:
    """Run a chain; when it fails, run each of its cells alone, to name the failing cells."""
    try:
        return strike_once(tmp_path / "chain", layout, part, plan, iterations, settings)
    except AssertionError as error:
        guilty = [c.name for c in part if not survives_alone(tmp_path, layout, c, settings)]
        alone = f"cells that fail alone: {', '.join(guilty) or 'none'}"
        raise AssertionError(f"{alone}\n{error}") from error


def survives_alone(tmp_path: Path, layout: Layout, cell: harness.Cell, settings: str) -> bool:
    """Return whether a job with this fault alone ends as the undisturbed job."""
    ((part, plan),) = harness.chains([cell], 1)
    try:
        strike_once(
            tmp_path / cell.name, layout, part, plan, harness.last_iteration(plan), settings
        )
    except AssertionError:
        return False
    return True


def strike_once(
    tmp_path: Path,
    layout: Layout,
    part: list[harness.Cell],
    plan: list[dict[str, object]],
    iterations: int,
    settings: str = "",
) -> Outcome:
    tmp_path.mkdir()
    return jobs.strike(
        tmp_path / "run",
        layout,
        iterations,
        plan,
        spares=2,
        refill=len(part),
        flags=EVALUATION,
        saving=f"--save {tmp_path / 'checkpoints'} --save-interval {harness.SAVE_INTERVAL}",
        settings=settings,
    )


CHAINED = "layout", "part", "plan", "iterations"


def chained(layout: Layout, chosen: list[harness.Cell]) -> list[Any]:
    """Return chains of these cells, all of one length, so that an undisturbed run serves them all.
    The last, which has the evaluations and saves, is in the quick selection."""
    found = list(harness.chains(chosen, CHAIN_LENGTH))
    names = [f"{layout.name}-{part[0].name}..{part[-1].name}" for part, _ in found]
    iterations = max(harness.last_iteration(plan) for _, plan in found)
    marks = [*([pytest.mark.full] * (len(found) - 1)), ()]
    return [
        pytest.param(layout, part, plan, iterations, marks=mark, id=name)
        for (part, plan), mark, name in zip(found, marks, names, strict=True)
    ]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    CHAINED,
    [
        *chained(PP2_DP2, harness.cells(PP2_DP2, harness.PHASES)),
        *chained(TP2_PP2_DP2, harness.cells(TP2_PP2_DP2, (*harness.PHASES, harness.TENSOR_PHASE))),
    ],
)
def test_every_cell(tmp_path, layout, part, plan, iterations):
    strike(tmp_path, layout, part, plan, iterations)


# The array of eight roles is for buddy.
@pytest.mark.full
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.exhaustive if n == "buddy" else ()) for n in SCHEMES]
)
def test_four_roles_covering_array_of_each_scheme(tmp_path, name):
    scheme = SCHEMES[name]
    array = [
        replace(cell, target=scheme.target) if cell.target == "node" else cell
        for cell in harness.pairwise(PP2_DP2, harness.PHASES, scheme.shift)
    ]
    ((part, plan),) = harness.chains(array, len(array))
    settings = f"--deadpool-protection {scheme.flags}"
    outcome = strike(tmp_path, PP2_DP2, part, plan, harness.last_iteration(plan), settings)
    kinds = restart_kinds(outcome)
    assert kinds.count("memory") >= len(array), outcome.story()
    assert "durable" not in kinds, outcome.story()
    if scheme.proof:
        lost = sum(cell.target == "node" for cell in array)
        # A successor of the coordinator's node may find its slots on this host.
        took_over = len(outcome.of_kind("coordinator")) - 1
        assert len(outcome.of_kind(scheme.proof)) >= lost - took_over > 0, outcome.story()


@pytest.mark.parametrize(
    CHAINED,
    chained(TP2_PP2_DP2, harness.pairwise(TP2_PP2_DP2, (*harness.PHASES, harness.TENSOR_PHASE))),
)
def test_eight_roles_covering_array(tmp_path, layout, part, plan, iterations):
    strike(tmp_path, layout, part, plan, iterations)


def test_one_cell(tmp_path, request):
    """``--cell LAYOUT:PHASE-TARGET-of-roleR``: one cell alone, as a failed chain names it."""
    wanted = request.config.getoption("--cell")
    layout_name, _, name = wanted.partition(":")
    layout = {found.name: found for found in (PP2_DP2, TP2_PP2_DP2)}[layout_name]
    (cell,) = [
        c for c in harness.cells(layout, (*harness.PHASES, harness.TENSOR_PHASE)) if c.name == name
    ]
    ((part, plan),) = harness.chains([cell], 1)
    strike_once(tmp_path / "cell", layout, part, plan, harness.last_iteration(plan))
