"""The DistributedDataParallel loop of configs/ddp.py, word for word, loses a node."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fake_nccl import KIND
from tests.faults.harness import jobs

SCRIPT = Path(__file__).parents[2] / "configs" / "ddp.py"
REPLICAS = 3


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("communicator", ["gloo", KIND])
def test_a_node_lost_in_the_backward_pass_changes_no_bit(tmp_path: Path, communicator: str) -> None:
    program = jobs.Program((str(SCRIPT),), REPLICAS)
    # DDP's reduction of a bucket: called by C++ in the backward pass.
    faults = [
        jobs.fault(
            "death", "comm", when_op="allreduce", when_role=1, when_iteration=6, target="node"
        )
    ]
    settings = f"--deadpool-communicator {communicator}"
    outcome = jobs.run_program(tmp_path / "run", program, faults, spares=1, settings=settings)
    jobs.assert_unnoticed(outcome, jobs.undisturbed(program), faults)
    assert max(jobs.recomputed(outcome)) <= 1


def test_a_schedule_reaches_the_groups_that_a_load_has_made() -> None:
    """Who sets a learning rate by the wrapper's groups would else set it nowhere."""
    (text,) = re.findall(r"^(class Update:.*?)\n\n\n", SCRIPT.read_text(), re.DOTALL | re.M)
    names: dict[str, Any] = {"SimpleNamespace": SimpleNamespace}
    exec(text, names)
    adam = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    update = names["Update"](adam)
    adam.load_state_dict(adam.state_dict())
    update.param_groups[0]["lr"] = 0.5
    assert adam.param_groups[0]["lr"] == 0.5
