"""Two draws of whole runs, others at each commit; and the command's errors for bad arguments."""

import hashlib
import json
import sys
from pathlib import Path

import pytest

from tests.common.programs import check_output
from tests.conftest import commit
from tests.fuzz import __main__ as program
from tests.fuzz.draws import read_choices
from tests.megatron_lm.harness.checkout import TAGS, needs_megatron_lm

PAIRS = Path(__file__).parent / "pairs.json"
SEED = int.from_bytes(hashlib.sha256(commit().encode()).digest()[:3], "big")


@pytest.mark.megatron_lm
@pytest.mark.slow
@pytest.mark.full
@pytest.mark.timeout(900)
@needs_megatron_lm
@pytest.mark.parametrize("seed", [SEED, SEED + 1])
def test_a_draw_is_bit_identical(tmp_path, seed):
    command = (sys.executable, "-m", "tests.fuzz", str(seed), "--json", "--no-shrink")
    row = json.loads(check_output(*command, "--directory", tmp_path / "draw", seconds=900))
    assert (row["seed"], row["result"], row["why"]) == (seed, "bit-identical", "")


@needs_megatron_lm
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("-1",), "SEED and --count: a natural number"),
        (("1", "--count", "2", "--only", "saves"), "--only is of one draw"),
        (("1", "--only", "router"), "others of this draw need them"),
        (("1", "--tag", "core_v0.15.0"), "invalid choice: 'core_v0.15.0'"),
        (("1", "--pairs", str(Path(__file__))), "is no table of pairs"),
    ],
)
def test_bad_arguments_are_named(arguments, named, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fuzz", *arguments])
    with pytest.raises(SystemExit, match="2"):
        program.main()
    assert named in capsys.readouterr().err


def test_table_of_draws_is_read():
    drawn = read_choices(PAIRS)
    assert {row["tag"] for row in drawn} <= {*TAGS}
    assert len({str(row) for row in drawn}) == len(drawn)


@needs_megatron_lm
def test_draws_are_shown_with_their_faults(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fuzz", "7", "--show", "--count", "2"])
    assert program.main() == 0
    output = capsys.readouterr().out
    assert output.startswith("seed 7: tag=core_v")
    assert '{"id": "first", "point": ' in output
