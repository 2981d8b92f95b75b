"""A layout that stock gloo trains wrongly, on the reconfigurable communicators."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.trainer.layouts import BF16, MODEL, OVERLAP, PP2, make_loop
from tests.trainer.ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.full]

VIRTUAL = f"{PP2} {BF16} --num-layers-per-virtual-pipeline-stage 1"
_communicators: Any = None


def connect(folder: Path, rank: int, world_size: int) -> None:
    """WORLD on the communicators of the product, connected at once."""
    global _communicators
    from deadpool_megatron.comms import Communicators

    _communicators = Communicators("gloo", address="127.0.0.1")
    _communicators.install()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    _communicators.attach(0, dist.FileStore(f"{folder}/store", world_size), rank, 30.0)


def train_on_seam(arguments: str) -> tuple[str, list[str]]:
    """Train to the end; answers state hash and emitted losses."""
    loop, emitted = make_loop(arguments)
    while not loop.done:
        loop.train_step()
        _communicators.finish_iteration()
    loop.synchronize_parameters()
    return loop.state_hash(), [facts["loss"] for kind, facts in emitted if kind == "step"]


def test_overlap_changes_no_bit_of_the_virtual_pipeline(text):
    arguments = f"{MODEL} {text} {VIRTUAL}"
    plain = run_ranks(4, train_on_seam, arguments, connect=connect)
    overlapped = run_ranks(4, train_on_seam, f"{arguments} {OVERLAP}", connect=connect)
    assert plain == overlapped
