"""Six public launch configurations, others at each commit, cut down to 4 or 8 roles of a CPU,
survive the loss of a node. Flags that need a GPU are left out, or a stand-in replaces their package
or kernel."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.common.turns import in_turn
from tests.conftest import commit
from tests.megatron_lm.harness.checkout import TAG, TAGS, needs_megatron_lm
from tests.reach.shrink import Shrunk
from tests.reach.trial import Result, trial

pytestmark = [
    *(pytest.mark.megatron_lm, pytest.mark.slow, pytest.mark.full, needs_megatron_lm),
    pytest.mark.skipif(TAGS[-1] != TAG, reason=f"their flags are of {TAGS[-1]}"),
]

LAUNCHES = [
    Shrunk(**json.loads(line))
    for line in Path(__file__).with_name("shrunk.jsonl").read_text().splitlines()
]
SIX = in_turn(LAUNCHES, lambda _: True, lambda launch: launch.id, commit())[:6]
# Its lengths are summed up in each step; no public configuration has it.
_MASKING = (
    "--dataloader-inter-document-masking --num-layers 2 --bf16 --train-iters 8 --eval-iters 1"
)
PACKED = Shrunk("packed", "multi_latent.py", _MASKING)


@pytest.mark.parametrize("shrunk", [*SIX, PACKED], ids=lambda launch: launch.id)
def test_public_configuration_survives_a_lost_node(tmp_path, shrunk):
    assert trial(tmp_path, shrunk) == (Result.IDENTICAL, "")


def test_reach_names_flags_that_are_left_out_or_refused(tmp_path):
    given = {"plain": {"--num-layers": "80", "--fp8-format": "hybrid"}, "other": {}}
    given["sharded"] = {"--use-megatron-fsdp": True}
    rows = [{"id": name, "script": "x.py", "flags": flags} for name, flags in given.items()]
    (tmp_path / "file").write_text("\n".join(map(json.dumps, rows)))
    program = [sys.executable, "-m", "tests.reach"]
    command = [*program, tmp_path / "file", "--json", "--only", "plain", "sharded"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    plain, sharded = map(json.loads, done.stdout.splitlines())
    assert (plain["id"], plain["result"], plain["without"]) == ("plain", "cut down", ["fp8"])
    assert (sharded["id"], sharded["result"]) == ("sharded", "refused")
    assert "--use-megatron-fsdp" in sharded["why"]
