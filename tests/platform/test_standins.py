"""The CPU stand-ins: there without a GPU, absent with one, and invisible to other code."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("this machine has a GPU", allow_module_level=True)


def _run(program: str) -> str:
    """Run a program in a process of its own, since stand-ins stay; answers its last line."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip().splitlines()[-1]


def test_nothing_is_replaced_on_a_gpu_machine() -> None:
    changed = _run(
        """
import torch
from deadpool_megatron.platform import select_platform, standins
torch.cuda.is_available = lambda: True
modules = (torch, torch.cuda, torch.cuda.random, torch.Tensor)
before = [dict(vars(module)) for module in modules]
standins.install()
select_platform().install()
import sys
print(select_platform().name, [before] != [[dict(vars(m)) for m in modules]],
      "megatron.core" in sys.modules)
"""
    )
    assert changed == "cuda False False"


def test_installing_twice_changes_nothing_more() -> None:
    same = _run(
        """
import torch
from deadpool_megatron.platform import select_platform
select_platform().install()
once = (torch.zeros, torch.Tensor.type, torch.cuda.Stream)
select_platform().install()
print(once == (torch.zeros, torch.Tensor.type, torch.cuda.Stream))
"""
    )
    assert same == "True"


def test_too_late_is_an_error() -> None:
    text = _run(
        """
import megatron.core
from deadpool_megatron.platform import select_platform
try:
    select_platform().install()
except RuntimeError as error:
    print(error)
"""
    )
    assert "before megatron.core is imported" in text


def test_only_megatron_sees_another_type() -> None:
    answers = _run(
        """
import torch
from deadpool_megatron.platform import select_platform
real_compile = torch.compile
select_platform().install()
ours = torch.zeros(1).type()
scope = {"__name__": "megatron.core.somewhere", "t": torch.zeros(1, dtype=torch.bfloat16)}
exec("answer = t.type(); cast = t.type(torch.float)", {**scope, "torch": torch}, scope)
print(ours, scope["answer"], scope["cast"].dtype, torch.compile is real_compile,
      torch.zeros(1, device="cuda").device, torch.empty(1, device="meta").device)
"""
    )
    assert answers == "torch.FloatTensor torch.cuda.BFloat16Tensor torch.float32 True cpu meta"


def test_named_random_states_work_on_the_cpu_generator() -> None:
    draws = _run(
        """
import torch
from deadpool_megatron.platform import select_platform
select_platform().install()
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
tracker = get_cuda_rng_tracker()
torch.manual_seed(1)
tracker.add("other", 2)
first = torch.rand(1)
with tracker.fork("other"):
    inside = torch.rand(1)
second = torch.rand(1)
torch.manual_seed(1)
plain = torch.rand(1), torch.rand(1)
torch.manual_seed(2)
print(bool(first == plain[0]), bool(second == plain[1]), bool(inside == torch.rand(1)))
"""
    )
    assert draws == "True True True"
