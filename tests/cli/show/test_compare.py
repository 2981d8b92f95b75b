"""``deadpool compare``: yes only for equal facts, and the first difference first."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from synthetic_run import write_run

from deadpool_megatron.cli.show import compare
from deadpool_megatron.cli.show.run_result import ResultError, read_result
from tests.cli.told import CarryOut, Complain

Change = Callable[[dict[str, Any]], None]


def compared(tmp_path: Path, change: Change, **options: Any) -> compare.Comparison:
    first = write_run(tmp_path / "first")
    second = write_run(tmp_path / "second", change=change, **options)
    return compare.compare_results(read_result(first), read_result(second))


def test_a_recovered_run_equals_the_undisturbed_one(tmp_path: Path) -> None:
    comparison = compared(tmp_path, lambda final: None, strike=6)
    assert comparison.identical
    assert comparison.compared == {"roles": 8, "steps": 10, "evaluations": 1, "hashes": 1}
    assert compare.describe(comparison)[0].startswith("bit-identical: yes")


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
        (lambda final: final["numbers"]["step"].pop(7), "step", 7, None),
        (put((9.0).hex(), "numbers", "evaluation", 10, "loss"), "evaluation loss", 10, None),
        (lambda final: final["numbers"]["evaluation"].clear(), "evaluation loss", 10, None),
        (put("b" * 64, "numbers", "state-hash", 5, "sha256"), "state", 5, 0),
        (put("b" * 64, "roles", "3", "sha256"), "state", None, 3),
        (put(79, "roles", "3", "samples"), "samples", None, 3),
        (lambda final: final["roles"].pop("7"), "role", None, 7),
        (put(4, "world_size"), "world size", None, None),
        (put(3, "exit_status"), "exit status", None, None),
    ],
)
def test_each_kind_of_difference_is_found(
    tmp_path: Path, change: Change, what: str, iteration: int | None, role: int | None
) -> None:
    comparison = compared(tmp_path, change)
    assert not comparison.identical
    (found,) = comparison.differences
    assert (found.what, found.iteration, found.role) == (what, iteration, role)


def test_an_event_that_cannot_be_understood_is_left_out_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    comparison = compared(tmp_path, put(1.5, "numbers", "step", 4, "loss"))
    (found,) = comparison.differences
    assert (found.iteration, found.second) == (4, "missing")
    assert "events.jsonl, line" in capsys.readouterr().err


def test_a_run_that_went_astray_is_listed_in_part(tmp_path: Path) -> None:
    comparison = compared(tmp_path, lambda final: None, iterations=1500, strike=4, shift=1e-9)
    assert len(comparison.differences) == 1000
    assert comparison.more == 1497 + 8 + 8 + 3 - 1000, "steps, states, samples, recoveries"
    assert compare.describe(comparison)[-1] == f"  and {1000 - 12 + comparison.more} more"


def test_hashes_that_only_one_run_took_are_no_difference(tmp_path: Path) -> None:
    comparison = compared(tmp_path, lambda final: final["numbers"]["state-hash"].clear())
    assert comparison.identical
    assert comparison.compared["hashes"] == 0


def test_the_first_difference_comes_first_and_the_rest_is_counted(tmp_path: Path) -> None:
    comparison = compared(tmp_path, lambda final: None, strike=4, shift=1e-9)
    assert comparison.differences[0].iteration == 4
    lines = compare.describe(comparison)
    assert lines[0].startswith("bit-identical: no")
    assert lines[1].startswith("first difference: iteration 4: loss: 0x")
    assert lines[-1] == "  and 3 more"


def test_nothing_is_never_identical_to_nothing(tmp_path: Path) -> None:
    def empty(final: dict[str, Any]) -> None:
        final.update(roles={}, exit_status=75, reason="no spare is left")
        final["numbers"]["step"].clear()

    first = write_run(tmp_path / "first", change=empty)
    second = write_run(tmp_path / "second", change=empty)
    with pytest.raises(ResultError, match="exit status 75, no spare is left"):
        compare.compare_results(read_result(first), read_result(second))


def test_exit_statuses_and_json(tmp_path: Path, carry_out: CarryOut) -> None:
    first = write_run(tmp_path / "first")
    same = write_run(tmp_path / "same")
    other = write_run(tmp_path / "other", strike=5, shift=1e-9)
    status, told, _ = carry_out("compare", first, same)
    assert (status, told.startswith("bit-identical: yes")) == (0, True)
    status, told, _ = carry_out("compare", first, other, "--json")
    facts = json.loads(told)
    assert status == 1
    assert facts["bit_identical"] is False
    assert facts["differences"][0]["iteration"] == 5


@pytest.mark.parametrize(
    ("prepare", "said"),
    [
        (lambda path: None, "no such directory"),
        (lambda path: path.mkdir(), "is not the directory of a run"),
        (lambda path: (path.mkdir(), (path / "run.json").touch()), "has no final.json"),
        (lambda path: (path.mkdir(), (path / "final.json").write_text("{")), "cannot be read"),
        (lambda path: (path.mkdir(), (path / "final.json").write_text("{}")), "is damaged"),
    ],
)
def test_bad_input_is_one_clear_line(
    tmp_path: Path, complain: Complain, prepare: Callable[[Path], object], said: str
) -> None:
    first = write_run(tmp_path / "first")
    prepare(tmp_path / "second")
    assert said in complain("compare", first, tmp_path / "second")


@pytest.mark.parametrize("loss", ["0xzz", "\x1b[31mred", "0x1p+5000"])
def test_a_loss_that_is_none_is_shown_as_it_stands(
    tmp_path: Path, carry_out: CarryOut, loss: str
) -> None:
    first = write_run(tmp_path / "first")
    change = put(loss, "numbers", "evaluation", 10, "loss")
    second = write_run(tmp_path / "second", change=change)
    status, told, _ = carry_out("compare", first, second)
    assert status == 1
    assert "first difference: iteration 10: evaluation loss" in told
    assert "\x1b" not in told
    assert loss.lstrip("\x1b") in told
