"""scripts/gpu/conformance.py on a build without CUDA: the names it reads, and its refusal."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

GPU = Path(__file__).parents[2] / "scripts" / "gpu"
sys.path.insert(0, str(GPU))

import conformance  # noqa: E402

_MODULE = """
import torch.distributed as dist
from torch.cuda import Event as Mark, lost
def made_up(torch_like):
    import torch
    torch_like.not_torch, dist.all_reduce, Mark.record, torch.nowhere.gone(dist.away.further)
"""


def test_conformance_finds_names_that_torch_lacks():
    found = {name: conformance.missing_prefix(name) for name in conformance.used_names(_MODULE)}
    assert {name: gone for name, gone in found.items() if gone} == {
        "torch.cuda.lost": "torch.cuda.lost",
        "torch.nowhere": "torch.nowhere",
        "torch.nowhere.gone": "torch.nowhere",
        "torch.distributed.away.further": "torch.distributed.away",
        "torch.distributed.away": "torch.distributed.away",
    }
    assert {"torch.distributed.all_reduce", "torch.cuda.Event.record"} <= found.keys()


@pytest.mark.skipif(torch.version.cuda is not None, reason="a CUDA build")
def test_conformance_refuses_build_without_cuda():
    command = [sys.executable, GPU / "conformance.py"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"conformance: torch {torch.__version__} has no CUDA")
    assert done.stderr.count("\n") == 1
