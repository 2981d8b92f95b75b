"""The CPU stand-ins exist only without a GPU, and only for Megatron."""

import json

import pytest
import torch

from tests.common.programs import check_output

if torch.cuda.is_available():
    pytest.skip("this machine has a GPU", allow_module_level=True)


def _run(program: str) -> str:
    """Run a program in a process of its own, since stand-ins stay; answers its last line."""
    return check_output("-W", "ignore", "-c", program).strip().splitlines()[-1]


@pytest.mark.slow
def test_nothing_is_replaced_on_a_gpu_machine_nor_too_late():
    changed, refused = json.loads(
        _run(
            """
import json, sys, types
import torch
from deadpool_megatron.megatron import stand_ins
absent = torch.cuda.is_available
torch.cuda.is_available = lambda: True
modules = (torch, torch.cuda, torch.cuda.random, torch.Tensor)
before = [dict(vars(module)) for module in modules]
stand_ins.install()
changed = [[before] != [[dict(vars(m)) for m in modules]], "megatron.core" in sys.modules]

torch.cuda.is_available = absent
sys.modules["megatron.core"] = types.ModuleType("megatron.core")
try:
    stand_ins.install()
except RuntimeError as error:
    print(json.dumps([changed, str(error)]))
"""
        )
    )
    assert changed == [False, False]
    assert "before megatron.core" in refused


@pytest.mark.full
@pytest.mark.slow
def test_stand_ins_answer_as_a_device_does():
    answers = json.loads(_run(_PROGRAM))
    assert answers == {
        "type outside Megatron": "torch.FloatTensor",
        "type inside Megatron": "torch.cuda.BFloat16Tensor",
        "a cast inside Megatron": "torch.float32",
        "torch.compile is untouched": True,
        "devices": ["cpu", "meta"],
        "installing twice changes nothing more": True,
        "a named state is the generator seeded so": True,
        "the unnamed state goes on undisturbed": True,
    }


_PROGRAM = """
import json
import torch
from deadpool_megatron.megatron import stand_ins
real_compile = torch.compile
stand_ins.install()
once = (torch.zeros, torch.Tensor.type, torch.cuda.Stream)
stand_ins.install()

inside = {"__name__": "megatron.core.somewhere", "torch": torch}
exec("t = torch.zeros(1, dtype=torch.bfloat16)", inside)
exec("kind, cast = t.type(), t.type(torch.float)", inside)

from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
tracker = get_cuda_rng_tracker()
torch.manual_seed(1)
tracker.add("other", 2)
unnamed = [torch.rand(1)]
with tracker.fork("other"):
    named = torch.rand(1)
unnamed.append(torch.rand(1))
torch.manual_seed(1)
expected = [torch.rand(1), torch.rand(1)]
torch.manual_seed(2)

print(json.dumps({
    "type outside Megatron": torch.zeros(1).type(),
    "type inside Megatron": inside["kind"],
    "a cast inside Megatron": str(inside["cast"].dtype),
    "torch.compile is untouched": torch.compile is real_compile,
    "devices": [str(torch.zeros(1, device=d).device) for d in ("cuda", "meta")],
    "installing twice changes nothing more":
        once == (torch.zeros, torch.Tensor.type, torch.cuda.Stream),
    "a named state is the generator seeded so": torch.equal(named, torch.rand(1)),
    "the unnamed state goes on undisturbed": unnamed == expected,
}))
"""
