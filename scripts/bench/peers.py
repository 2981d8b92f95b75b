#!/usr/bin/env python
"""The same model, machine and failure with deadpool and with other systems that users have today.

    .venv/bin/python scripts/bench/peers.py --install             # once; downloads the peers
    .venv/bin/python scripts/bench/peers.py [--rounds N] [--side NAME...] [--out FILE]

Four roles (PP2 x DP2, distributed optimizer) on gloo. In each round the same training runs without
any protection and undisturbed, then once per side, where one process is killed in a backward pass
after the measured steps; on sides that end in ``-node``, where each node has a launcher of its own
and there is one for a spare, with all that its node runs. Per side: step time before the kill over
that of the undisturbed run; seconds from the kill to the end of the first step that is new; seconds
the failure cost in all; steps computed again; and whether every loss and the final states are those
of the undisturbed run, bit for bit. The first steps of a run warm up; everything else counts. A run
that fails is listed with its reason, and so is a peer that cannot be run here.

The peers are run from environments of their own, which only --install makes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.command import parser_of, run_bench
from common.struck import AFTER, NODES, SIZES, TOKENS, iterations, sizes_of
from common.trainings import WARM_UP, BenchError, parameters
from other_systems.environments import PACKAGES, PeerUnavailableError, check, install
from other_systems.outcomes import Outcome, OutcomeError, first_difference, outcome, ratio_of_means
from other_systems.sides import NOT_RUN, SIDES, Run, Side, run_side, run_undisturbed

from deadpool_megatron.observe.steps import summary

_ENVIRONMENTS = Path.home() / ".cache" / "deadpool-megatron" / "peers"


@dataclass
class Snapshot:
    """All runs of one side; in ``rounds`` by the number of the round."""

    rounds: dict[int, tuple[Run, Outcome, str | None]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


def measure(
    name: str, rounds: int, steps: int, sides: dict[str, Side], base: Path, environments: Path
) -> dict[str, Any]:
    """Run all sides of a size in turns. Raises BenchError when the undisturbed training fails."""
    undisturbed: list[Run] = []
    taken = {side: Snapshot() for side in sides}
    for number in range(rounds):
        _print(f"{name}: undisturbed, {number + 1} of {rounds}")
        undisturbed.append(run_undisturbed(name, steps, base))
        for label, side in sides.items():
            _print(f"{name}: {label}, {number + 1} of {rounds}")
            with tempfile.TemporaryDirectory(dir=base) as directory:
                try:
                    run = run_side(side, name, steps, Path(directory), environments)
                    taken[label].rounds[number] = run, _cost(run), _difference(run, undisturbed[0])
                except (BenchError, OutcomeError) as error:
                    _print(f"{label}: {error}")
                    taken[label].failures.append(str(error))
    return {
        "parameters": parameters(sizes_of(name)),
        "undisturbed": {
            "step_seconds": summary([s for r in undisturbed for s in r.measured.step_seconds]),
            "bit_identical": all(_difference(r, undisturbed[0]) is None for r in undisturbed),
            "runs": [run.measured.step_seconds for run in undisturbed],
        },
        "sides": {
            label: facts_of(side, taken[label], undisturbed) for label, side in sides.items()
        },
    }


def _cost(run: Run) -> Outcome:
    assert run.killed_at is not None
    mean = summary(run.measured.step_seconds)["mean"]
    return outcome(run.reports, run.killed_at, mean, run.recomputed)


def _difference(run: Run, undisturbed: Run) -> str | None:
    """Return where a run differs from the undisturbed run, in a loss or at the end; or None."""
    expected = {report.iteration: report.loss for report in undisturbed.reports}
    found = first_difference(run.reports, expected)
    if found is None and run.hashes != undisturbed.hashes:
        return "final state"
    return found


def facts_of(side: Side, taken: Snapshot, undisturbed: list[Run]) -> dict[str, Any]:
    """Return the facts of a side: all its runs, and every single value."""
    facts: dict[str, Any] = {"what": side.description, "failed_runs": taken.failures}
    if not taken.rounds:
        return facts
    runs = [run for run, _, _ in taken.rounds.values()]
    costs = [cost for _, cost, _ in taken.rounds.values()]
    differences = [difference for _, _, difference in taken.rounds.values()]
    steps = [seconds for run in runs for seconds in run.measured.step_seconds]
    # The plain run of a round in which this side failed does not count.
    base = [s for number in taken.rounds for s in undisturbed[number].measured.step_seconds]
    return {
        **facts,
        "step_seconds": summary(steps),
        "ratio": ratio_of_means(steps, base),
        "ratio_of_each_round": [
            ratio_of_means(run.measured.step_seconds, undisturbed[number].measured.step_seconds)
            for number, (run, _, _) in taken.rounds.items()
        ],
        "seconds_to_new_step": summary([cost.seconds_to_new_step for cost in costs]),
        "seconds_lost": summary([cost.seconds_lost for cost in costs]),
        "steps_recomputed": [cost.steps_recomputed for cost in costs],
        "bit_identical": [difference is None for difference in differences],
        "first_differences": [each for each in differences if each is not None],
        "costs": [cost.to_dict() for cost in costs],
        "runs": [run.measured.step_seconds for run in runs],
    }


def available(labels: list[str], environments: Path) -> tuple[dict[str, Side], dict[str, str]]:
    """Return the sides that can be run, and for all others the reason."""
    sides: dict[str, Side] = {}
    reasons = dict(NOT_RUN)
    for label, side in SIDES.items():
        if label not in labels:
            reasons[label] = side.only_named or "not asked for"
            continue
        try:
            if side.peer:
                check(environments, side.peer)
            sides[label] = side
        except PeerUnavailableError as error:
            reasons[label] = str(error)
    return sides, reasons


def install_all(environments: Path) -> int:
    """Make all environments; returns the exit status."""
    status = 0
    for peer in PACKAGES:
        try:
            install(environments, peer)
            check(environments, peer)
            _print(f"{peer}: ready in {environments}")
        except PeerUnavailableError as error:
            print(f"peers bench: {error}", file=sys.stderr)
            status = 1
    return status


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(__doc__, 2, "turns of each side", 10)
    usual = [label for label, side in SIDES.items() if not side.only_named]
    parser.add_argument("--size", choices=SIZES, nargs="*", default=["5M"])
    parser.add_argument("--side", choices=SIDES, nargs="*", default=usual, metavar="NAME")
    parser.add_argument(
        "--environments",
        type=Path,
        default=_ENVIRONMENTS,
        metavar="DIR",
        help=f"where those of the peers are (default: {_ENVIRONMENTS})",
    )
    parser.add_argument(
        "--install", action="store_true", help="make the environments with pip, measure nothing"
    )
    return parser.parse_args()


def main() -> int:
    """Run from the command line; returns the exit status."""
    args = parse_arguments()
    if args.install:
        return install_all(args.environments)
    sides, reasons = available(args.side, args.environments)
    for label, reason in reasons.items():
        _print(f"{label}: not run: {reason}")
    packages = {
        label: PACKAGES[side.peer].requirement for label, side in sides.items() if side.peer
    }

    def measured(base: Path) -> dict[str, Any]:
        return {
            "roles": NODES,
            "tokens_per_step": TOKENS,
            "warm_up_steps": WARM_UP,
            "measured_steps": args.steps,
            "killed_in_iteration": iterations(args.steps) - AFTER,
            "iterations": iterations(args.steps),
            "packages": packages,
            "not_run": reasons,
            "sizes": {
                name: measure(name, args.rounds, args.steps, sides, base, args.environments)
                for name in args.size
            },
        }

    def is_good(facts: dict[str, Any]) -> bool:
        """The outcome of a peer is a finding; that of deadpool is a test."""
        own = [
            size["sides"][label]
            for size in facts["sizes"].values()
            for label, side in sides.items()
            if side.start == "deadpool"
        ]
        return all(not runs["failed_runs"] and all(runs["bit_identical"]) for runs in own)

    return run_bench("peers", args.out, measured, is_good)


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
