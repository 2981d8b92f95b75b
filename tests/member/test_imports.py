"""A member knows its framework by the seam alone, and an import changes nothing for others."""

import pytest

from tests.common.programs import check_output


@pytest.mark.slow
def test_member_imports_no_framework():
    names = check_output("-c", "import sys, deadpool_megatron.member; print(*sys.modules)").split()
    assert "deadpool_megatron.member.entry" in names
    assert not [name for name in names if name.split(".")[0] in ("megatron", "transformer_engine")]
    assert not [name for name in names if name.startswith("deadpool_megatron.megatron")]


@pytest.mark.slow
@pytest.mark.parametrize("room", ["member", "megatron", "comms", "megatron.stand_ins"])
def test_import_replaces_nothing_of_torch(room):
    program = (
        "import torch, torch.distributed\n"
        "places = torch, torch.cuda, torch.Tensor, torch.distributed.ProcessGroup\n"
        "before = [dict(vars(place)) for place in places]\n"
        f"import deadpool_megatron.{room}\n"
        "print([name for place, old in zip(places, before) for name in old\n"
        "    if vars(place).get(name) is not old[name]])"
    )
    assert check_output("-W", "ignore", "-c", program).strip() == "[]"
