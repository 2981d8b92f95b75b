"""Programs that are not Megatron-LM's call its pretrain(): taken by what they do, and protected."""

import os
from pathlib import Path

import pytest

from tests.faults.harness.jobs import Program
from tests.megatron_lm.harness.arguments import small
from tests.megatron_lm.harness.checkout import needs_megatron_lm
from tests.megatron_lm.harness.runs import PP2_DP2, SEGMENTS, dies, strike, tree

pytestmark = [pytest.mark.megatron_lm, pytest.mark.slow, pytest.mark.full, needs_megatron_lm]

PROGRAMS = {
    "own_model.py": ("house-stride=3", "house-smoothing=0.1"),
    "packed_text.py": ("piece-length=8", "loss-weight=0.5"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_of_another_house_survives(tmp_path, name, monkeypatch):
    """Each of its own flags is unreviewed, and is allowed by its name."""
    monkeypatch.setenv("PYTHONPATH", str(tree()), prepend=os.pathsep)
    own = [word for each in PROGRAMS[name] for word in f"--{each}".split("=")]
    allowed = [f"--deadpool-allow-unreviewed={each.split('=')[0]}" for each in PROGRAMS[name]]
    flags = {**PP2_DP2, **SEGMENTS, "train_iters": 8, "log_progress": True}
    script = Path(__file__).parent / "programs" / name
    program = Program((str(script), *small(**flags), *own, "--deadpool", *allowed), 4)
    plan = [
        dies("forward", "forward", 0, 2, nth=2),
        dies("update", "optimizer.inside", 3, 5),
        dies("log", "log.end", 3, 7),
    ]
    strike(tmp_path / "run", program, plan)
