"""``deadpool compare``: yes only for equal facts, and the first difference first."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deadpool_megatron.cli import compare
from deadpool_megatron.cli.run_result import ResultError, read_result
from tests.cli.told import CarryOut, Complain
from tests.common.synthetic_run import write_run

Change = Callable[[dict[str, Any]], None]


def compared(tmp_path: Path, change: Change, **options: Any) -> compare.Comparison:
    first = write_run(tmp_path / "first")
    second = write_run(tmp_path / "second", change=change, **options)
    return compare.compare_results(read_result(first), read_result(second))


def test_a_recovered_run_equals_the_undisturbed_one(tmp_path: Path) -> None:
    comparison = compared(tmp_path, lambda final: None, strike=6)
    assert comparison.identical
    assert comparison.compared == {"roles": 8, "steps": 10, "evaluations": 1, "hashes": 1}


def put(value: Any, *path: Any) -> Change:
    def change(final: dict[str, Any]) -> None:
        holder = final
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "what", "iteration", "role"),
    [
        (put((1.0).hex(), "numbers", "step", 4, "loss"), "loss", 4, None),
        (put(None, "numbers", "step", 5, "grad_norm"), "grad norm", 5, None),
        (put((1e-4).hex(), "numbers", "step", 9, "learning_rate"), "learning rate", 9, None),
        (put(True, "numbers", "step", 2, "skipped"), "skipped", 2, None),
        (put(15, "numbers", "step", 2, "samples"), "samples", 2, None),
        # An event that cannot be understood is left out.
        (put(1.5, "numbers", "step", 4, "loss"), "step", 4, None),
        (lambda final: final["numbers"]["step"].pop(10), "step", 10, None),
        (put((9.0).hex(), "numbers", "evaluation", 10, "loss"), "evaluation loss", 10, None),
        (lambda final: final["numbers"]["evaluation"].clear(), "evaluation loss", 10, None),
        (put("b" * 64, "numbers", "state-hash", 5, "sha256"), "state", 5, 0),
        (put("b" * 64, "roles", "3", "sha256"), "state (weights or optimizer state)", None, 3),
        (put(79, "roles", "3", "samples"), "samples", None, 3),
        (lambda final: final["roles"].pop("7"), "role", None, 7),
        (put(4, "world_size"), "world size", None, None),
        (put(3, "exit_status"), "exit status", None, None),
    ],
)
def test_each_kind_of_difference_is_found(
    tmp_path: Path, change: Change, what: str, iteration: int | None, role: int | None
) -> None:
    (found,) = compared(tmp_path, change).differences
    assert (found.what, found.iteration, found.role) == (what, iteration, role)
    if what in ("step", "role"):
        assert (found.first, found.second) == ("present", "missing")


@pytest.mark.parametrize(
    ("others", "what", "is_unseeded"),
    [
        ({"rng.python": "0"}, "state (random state of python)", True),
        (
            {"rng.python": "0", "rng.numpy": "0"},
            "state (random state of numpy, random state of python)",
            True,
        ),
        ({"rng.python": "0", "counters": "0"}, "state (counters, random state of python)", False),
        ({}, "state (weights or optimizer state)", False),
    ],
)
def test_what_differs_in_a_state_is_named(
    tmp_path: Path, others: dict[str, str], what: str, is_unseeded: bool
) -> None:
    """Where it is the generators alone that a program may not have seeded, that is said."""

    def change(final: dict[str, Any]) -> None:
        final["roles"]["3"]["sha256"] = "b" * 64
        final["roles"]["3"]["entries"] |= others

    states = compared(tmp_path, change)
    assert [one.what for one in states.differences] == [what]
    assert ("'random' and 'numpy'" in compare.describe(states)[-1]) == is_unseeded


def test_a_run_that_went_astray_is_listed_in_part(tmp_path: Path) -> None:
    comparison = compared(tmp_path, lambda final: None, iterations=1500, strike=4, shift=1e-9)
    assert len(comparison.differences) == 1000
    assert comparison.differences[0].iteration == 4, "the first one comes first"
    assert comparison.more == 1497 + 8 + 8 + 3 - 1000, "steps, states, samples, recoveries"
    assert str(1000 - 12 + comparison.more) in compare.describe(comparison)[-1]


def test_hashes_that_only_one_run_took_are_no_difference(tmp_path: Path) -> None:
    comparison = compared(tmp_path, lambda final: final["numbers"]["state-hash"].clear())
    assert comparison.identical
    assert comparison.compared["hashes"] == 0


def test_nothing_is_never_identical_to_nothing(tmp_path: Path) -> None:
    def empty(final: dict[str, Any]) -> None:
        final.update(roles={}, exit_status=75, reason="no spare is left")
        final["numbers"]["step"].clear()

    first, second = (write_run(tmp_path / name, change=empty) for name in ("first", "second"))
    with pytest.raises(ResultError, match="exit status 75"):
        compare.compare_results(read_result(first), read_result(second))


def test_exit_statuses_and_json(tmp_path: Path, carry_out: CarryOut) -> None:
    first, same = (write_run(tmp_path / name) for name in ("first", "same"))
    other = write_run(tmp_path / "other", strike=5, shift=1e-9)
    status, told, _ = carry_out("compare", first, same)
    assert (status, told.startswith("bit-identical: yes")) == (0, True)
    status, told, _ = carry_out("compare", first, other, "--json")
    facts = json.loads(told)
    assert (status, facts["bit_identical"]) == (1, False)
    assert facts["differences"][0]["iteration"] == 5


@pytest.mark.parametrize("final", [None, "{", "{}"])
def test_what_is_no_result(tmp_path: Path, complain: Complain, final: str | None) -> None:
    run = write_run(tmp_path / "run")
    complain("compare", run, tmp_path / "none")
    (run / "final.json").unlink()
    if final is not None:
        (run / "final.json").write_text(final)
    complain("compare", run, run)
