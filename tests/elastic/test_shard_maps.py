"""The shard maps of Megatron's optimizers: state cut for another number of model replicas is that
of an optimizer which was built for it, in every byte."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore

from deadpool_megatron.layout import shard_map
from deadpool_megatron.layout.records import RoleLayout
from deadpool_megatron.megatron import optimizer
from deadpool_megatron.megatron.identity import identify
from deadpool_megatron.member.role_layout import role_layout
from tests.trainer.layouts import BF16, BUCKETS, MOE, OVERLAP, PP2, TINY, TP2, make_loop

# Ranks before and after, flags.
CASES = {
    "bf16": (4, 2, f"{PP2} {BF16}"),
    "buckets": (4, 2, f"--use-distributed-optimizer {BUCKETS} {OVERLAP}"),
    "whole": (4, 2, TP2),
    "experts": (4, 2, f"{BF16} {MOE}"),
    "instances": (4, 2, f"{BF16} --num-distributed-optimizer-instances 2"),
}


def built(arguments: str, ranks: int) -> Iterator[tuple[RoleLayout, dict[str, bytes]]]:
    """Yield the layout and the parts of each rank; the numbers in them say what they are of."""
    for rank in range(ranks):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        loop, _ = make_loop(f"{TINY} {arguments} --data {__file__}")
        optimizer.complete_state(loop.optimizer)
        parts, content = optimizer.ShardState(loop.optimizer).parts, dict[str, bytes]()
        names = {id(parameter): i for i, (_, parameter) in enumerate(loop.named_parameters())}
        stage = parallel_state.get_pipeline_model_parallel_rank()
        slices = (
            parallel_state.get_expert_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_rank(),
        )
        for inner, part in zip(optimizer.inner_optimizers(loop.optimizer), parts, strict=True):
            models = {id(b): (a, at) for a, b, at in optimizer.model_parameters(inner)}
            for updated in optimizer.parameters_of(inner):
                model, start = models.get(id(updated), (updated, 0))
                of_slice = 2 * stage + slices[getattr(model, "allreduce", True)]
                kept = {"": updated, **optimizer.state_tensors(inner, updated)}
                for number, tensor in enumerate(kept.values()):
                    first = start if tensor.dim() else 0
                    values = torch.arange(first, first + tensor.numel(), dtype=torch.float64)
                    values += 1e4 * (names[id(model)] * 4 + number) + 2e6 * of_slice
                    tensor.detach().copy_(values.view(tensor.shape))
            buffer = bytearray(part.nbytes)
            for view, tensor in zip(part.views(memoryview(buffer)), part.tensors, strict=True):
                view.copy_(tensor)
            content[part.name] = bytes(buffer)
        identify(loop, parts)
        yield role_layout(rank, parts, 64, [rank], 2, ""), content
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


@pytest.mark.parametrize("name", CASES)
def test_state_cut_for_another_size_is_that_of_its_own_optimizer(name):
    *ranks, flags = CASES[name]
    large, small = (list(built(flags, count)) for count in ranks)
    torch.use_deterministic_algorithms(False)  # as it was
    for old, new in ((large, small), (small, large)):
        held = {(each.role, n): r for each, _ in old for n, r in each.shard_map.runs.items()}
        for layout, parts in new:
            for part, content in parts.items():
                target = memoryview(bytearray(len(content)))
                found = shard_map.spans(layout.shard_map.runs[part], held)
                every = [span for chosen in found.values() for span in chosen]
                assert all(shard_map.gaps(every, len(content)))  # of alignment alone
                for (role, source), chosen in found.items():
                    shard_map.copy_into(target, chosen, 0, memoryview(old[role][1][source]))
                assert bytes(target) == content
