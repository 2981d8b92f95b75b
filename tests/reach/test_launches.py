"""Six public launch configurations, by turns from commit to commit, cut down to 4 or 8 roles of a
CPU, survive the loss of a node. What needs a GPU is left out; a stand-in of a package or a kernel
takes its place where there is one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from deadpool_megatron.support.judgement import allowances, judge
from tests.common.turns import in_turn
from tests.conftest import commit
from tests.faults.harness.jobs import Program
from tests.megatron_lm.harness.checkout import TAG, TAGS, needs_megatron_lm
from tests.megatron_lm.harness.runs import dies, strike, tree

pytestmark = [
    *(pytest.mark.megatron_lm, pytest.mark.slow, pytest.mark.full, needs_megatron_lm),
    pytest.mark.skipif(TAGS[-1] != TAG, reason=f"their flags are of {TAGS[-1]}"),
]

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
FOLDERS = (ROOT, ROOT / "tests" / "megatron_lm" / "harness" / "emerging")
COMMON = (HERE / "common.args").read_text().split()
LAUNCHES = {
    row["id"]: row for row in map(json.loads, (HERE / "shrunk.jsonl").read_text().splitlines())
}
SIX = in_turn([*LAUNCHES], lambda name: True, lambda name: name, commit())[:6]


@pytest.mark.parametrize("name", SIX)
def test_what_people_run_survives(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the update of role 1, which has changed a part of the weights."""
    paths = os.pathsep.join(map(str, (*FOLDERS, tree())))
    monkeypatch.setenv("PYTHONPATH", paths, prepend=os.pathsep)
    script, flags = LAUNCHES[name]["script"], LAUNCHES[name]["flags"]
    path = HERE / script if (HERE / script).exists() else tree() / script
    command = (str(path), *COMMON, *flags.split(), "--deadpool")
    owed = " ".join(allowances(judge(command))).split()
    cut = [f"--{kind}-model-parallel-size 2" in flags for kind in ("tensor", "pipeline")]
    program = Program((*command, *owed), 4, 2 if all(cut) else 1)
    strike(tmp_path / "run", program, [dies("loss", "optimizer.inside", 1, 5)])
