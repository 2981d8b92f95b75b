"""The loops of configs/ddp.py and configs/fsdp2.py lose nodes where Megatron cannot be imported."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fake_nccl import KIND
from tests.faults.harness import jobs

CONFIGS = Path(__file__).parents[2] / "configs"
NODES = 3
# Read by each Python process at its start.
WITHOUT_MEGATRON = """
import sys

class WithoutMegatron:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "megatron":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, WithoutMegatron())
"""

pytestmark = [pytest.mark.slow, pytest.mark.full]


@pytest.fixture(autouse=True)
def _without_megatron(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_MEGATRON)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]))
    # That of all tests has imported it.
    monkeypatch.setattr(jobs, "_importer", lambda command: None)
    assert subprocess.run([sys.executable, "-c", "import megatron"], check=False).returncode == 1


def losses(output: str) -> dict[str, str]:
    """Loss by iteration, as printed."""
    return dict(re.findall(r"step (\d+)  loss (\S+)", output))


def loses(directory: Path, name: str, faults: Sequence[Any], **options: Any) -> jobs.Outcome:
    program = jobs.Program((str(CONFIGS / name),), NODES)
    undisturbed = jobs.undisturbed(program)
    outcome = jobs.run_program(directory / "run", program, faults, **options)
    jobs.assert_unnoticed(outcome, undisturbed, faults)
    printed, wanted = losses(outcome.output), losses(undisturbed.output)
    assert {step: wanted[step] for step in printed if step in wanted}.items() <= printed.items()
    assert "12" in printed
    return outcome


@pytest.mark.parametrize(
    ("name", "operation", "communicator"),
    [
        ("ddp.py", "allreduce", "gloo"),
        ("ddp.py", "allreduce", KIND),
        ("fsdp2.py", "reduce_scatter_single", "gloo"),
    ],
)
def test_node_lost_in_the_backward_pass_changes_no_bit(tmp_path, name, operation, communicator):
    faults = [
        # The second of the iteration: gradients of some layers are reduced, of others not.
        jobs.dies("death", "comm", 1, 6, when_op=operation, nth=2 if name == "fsdp2.py" else 1)
    ]
    settings = f"--deadpool-communicator {communicator}"
    outcome = loses(tmp_path, name, faults, spares=1, settings=settings)
    assert max(jobs.recomputed(outcome)) <= 1


def test_all_nodes_lost_leave_the_checkpoint(tmp_path):
    fault = jobs.dies("all", "optimizer.inside", 0, 9, nodes=[2, 1, 0])
    outcome = loses(tmp_path, "fsdp2.py", [fault], spares=NODES)
    assert jobs.restart_kinds(outcome)[-1] == "durable"
