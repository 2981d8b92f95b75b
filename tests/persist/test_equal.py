"""An export from slots equals, byte for byte, the run's own save."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.persist.harness.checkpoints import differences
from tests.trainer.layouts import LAYOUTS, MODEL, make_loop, steps
from tests.trainer.ranks import run_ranks

DUE = "--eval-interval 3 --eval-iters 1 --log-interval 4"
NAMES = [name for name in LAYOUTS if name not in ("fp32-whole", "overlap")]


def save_both_ways(arguments: str, folder: Path, gathered: bool = False) -> None:
    """Train three iterations; one checkpoint from the live objects, one as an export makes it."""
    import torch.distributed as dist

    from deadpool_megatron.layout.records import Generation
    from deadpool_megatron.megatron import loop_extras
    from deadpool_megatron.megatron.optimizer import ShardState, complete_state
    from deadpool_megatron.megatron.template_maker import make_template
    from deadpool_megatron.member.role_layout import role_layout
    from deadpool_megatron.persist import torch_dist
    from deadpool_megatron.state import extras as codec
    from deadpool_megatron.state.template import read_template, write_template
    from deadpool_megatron.vault.disk.pinned_snapshot import Snapshot
    from deadpool_megatron.vault.shm.segment import checksum

    role = dist.get_rank()
    loop, _ = make_loop(arguments)
    if gathered:
        make = loop.optimizer.sharded_state_dict
        loop.optimizer.sharded_state_dict = lambda *args, metadata, **kwargs: make(
            *args, metadata={**metadata, **GATHERED}, **kwargs
        )
    complete_state(loop.optimizer)
    parts = ShardState(loop.optimizer).parts
    layout = role_layout(role, parts, 64 << 10, [role], 2, "")
    made = make_template(loop, parts, layout)
    assert not made.refusal, made.refusal
    write_template(folder, made)
    steps(loop, 3)
    own, exported = folder / "own", folder / "exported"
    exported.mkdir(exist_ok=True)
    loop.save_checkpoint(own)

    content, places = bytearray(), {}
    for part in parts:
        buffer = bytearray(part.nbytes)
        for view, live in zip(part.views(memoryview(buffer)), part.tensors, strict=True):
            view.copy_(live)
        places[part.name] = (len(content), len(buffer), checksum(memoryview(buffer)))
        content += buffer
    extras = codec.encode(loop_extras.capture(loop))
    places["extras@evaluation"] = (len(content), len(extras), checksum(memoryview(extras)))
    path = folder / f"taken-{role}"
    path.write_bytes(content + extras)
    template = read_template(folder, role, layout.layout_hash)
    hash_ = layout.layout_hash
    taken = Snapshot(role, hash_, Generation(1, 3), "evaluation", str(path), places)
    source = torch_dist.GenerationSource(taken, folder)
    index = json.loads(json.dumps(torch_dist.write_role(template, source, exported)))
    torch_dist.write_extras(source, exported, role, dist.get_world_size())
    indexes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(indexes, index)
    if role == 0:
        torch_dist.join(exported, indexes, torch_dist.filled(template.common, source))
    dist.barrier()


GATHERED = {"distrib_optim_sharding_type": "fully_reshardable"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "gathered"),
    [
        (NAMES[0], False),
        *(pytest.param(name, False, marks=pytest.mark.full) for name in NAMES[1:]),
        *(pytest.param(n, True, marks=pytest.mark.full) for n in ("bf16", "moe-bias-jitter")),
    ],
)
def test_an_export_equals_a_save(name, gathered, text, tmp_path):
    """``gathered``: as with --dist-ckpt-optim-fully-reshardable, parameters of the optimizer in
    model space."""
    ranks, flags = LAYOUTS[name]
    run_ranks(ranks, save_both_ways, f"{MODEL} {text} {flags} {DUE}", tmp_path, gathered)
    assert differences(tmp_path / "own", tmp_path / "exported") == []
