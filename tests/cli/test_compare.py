"""``deadpool compare``: yes only for equal facts, and the first difference first."""

import json
from typing import Any

import pytest

from deadpool_megatron.cli import compare
from deadpool_megatron.cli.run_result import ResultError, read_result
from tests.common.synthetic_run import write_run


def test_nothing_is_never_identical_to_nothing(tmp_path):
    def empty(final: dict[str, Any]) -> None:
        final.update(roles={}, exit_status=75, reason="no spare is left")
        final["numbers"]["step"].clear()

    first, second = (write_run(tmp_path / name, change=empty) for name in ("first", "second"))
    with pytest.raises(ResultError, match="exit status 75"):
        compare.compare_results(read_result(first), read_result(second))


def test_exit_statuses_and_json(tmp_path, carry_out):
    first, same = (write_run(tmp_path / name) for name in ("first", "same"))
    other = write_run(tmp_path / "other", fault_at=5, shift=1e-9)
    status, told, _ = carry_out("compare", first, same)
    assert (status, told.startswith("bit-identical: yes")) == (0, True)
    status, told, _ = carry_out("compare", first, other, "--json")
    facts = json.loads(told)
    assert (status, facts["bit_identical"]) == (1, False)
    assert facts["differences"][0]["iteration"] == 5


@pytest.mark.parametrize("final", [None, "{", "{}"])
def test_what_is_no_result(tmp_path, complain, final):
    run = write_run(tmp_path / "run")
    complain("compare", run, tmp_path / "none")
    (run / "final.json").unlink()
    if final is not None:
        (run / "final.json").write_text(final)
    complain("compare", run, run)
