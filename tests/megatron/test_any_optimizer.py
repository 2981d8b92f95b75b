"""An optimizer's state is what it holds: no list of names, and what cannot be kept is refused.

Each optimizer is trained twice: as it is, and completed, captured and taken back on the way.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from torch import Tensor

from deadpool_megatron.megatron import dimensions, optimizer as optimizers
from deadpool_megatron.megatron.optimizer import ShardState, complete_state
from deadpool_megatron.state.optimizer_state import UnsupportedState
from tests.gpu.digests import state_digests
from tests.megatron import gpu_rig
from tests.megatron.gpu_rig import Slot, begun_and_continued, differences, plain_inner, update
from tests.megatron.plain_loop import plain_loop

_one_rank = gpu_rig.one_rank


class Counting(torch.optim.Optimizer):
    """An optimizer of a fork: it counts steps for each parameter, and replaces tensors."""

    def __init__(self, params: Any, lr: float = 0.1, late: int = 0, odd: object = 0.5) -> None:
        super().__init__(params, {"lr": lr, "late": late, "odd": odd})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state.update(step=0, slow=torch.zeros_like(parameter), kind="slow")
                state["step"] += 1
                if state["step"] == group["late"]:
                    state["more"] = torch.zeros(1)
                state["slow"] = 0.9 * state["slow"] + parameter.grad
                parameter.sub_(state["slow"], alpha=group["lr"] / state["step"])


class FirstGradient(Counting):
    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("scale", parameter.grad.abs().max() + 1)
                parameter.sub_(parameter.grad / state["scale"], alpha=group["lr"])


Make = Callable[[Any], torch.optim.Optimizer]
KINDS: dict[str, Make] = {
    "sgd": lambda own: torch.optim.SGD(own, 0.1, weight_decay=0.01),
    "momentum": lambda own: torch.optim.SGD(own, 0.1, momentum=0.9),
    "nesterov": lambda own: torch.optim.SGD(own, 0.1, momentum=0.9, nesterov=True),
    "amsgrad": lambda own: torch.optim.Adam(own, 0.1, amsgrad=True),
    "adagrad": lambda own: torch.optim.Adagrad(own, 0.1, initial_accumulator_value=0.5),
    "of a fork": Counting,
    "of a fork, without a rate at first": lambda own: Counting(own, lr=0.0),
}


class Chunk(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.matrix = torch.nn.Parameter(torch.randn(3, 4))
        self.bias = torch.nn.Parameter(torch.zeros(4))


def trained(make: Make, **more: Any) -> tuple[Any, Any]:
    chunk = Chunk()
    inner = plain_inner(make(list(chunk.parameters())), **more)
    return inner, plain_loop([chunk], inner)


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_any_optimizer_begins_and_continues_exactly(make):
    begun_and_continued(lambda: trained(make)[1])


REFUSED: dict[str, tuple[Make, str]] = {
    "dampening": (lambda own: torch.optim.SGD(own, 0.1, momentum=0.9, dampening=0.5), "SGD makes"),
    "first gradient": (FirstGradient, "FirstGradient makes"),
    "a product": (lambda own: torch.optim.NAdam(own, 0.1), "NAdam makes"),
    "rates of their own": (lambda own: torch.optim.Rprop(own, 0.5), "Rprop makes"),
    "a set": (lambda own: Counting(own, odd={1, 2}), "Counting keeps odd, a set"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_state_that_cannot_be_there_before_the_first_update_is_refused(name):
    make, message = REFUSED[name]
    with pytest.raises(UnsupportedState, match=message):
        complete_state(trained(make)[1].optimizer)


def test_state_that_appears_later_ends_the_run():
    """It would be lost with the node."""
    inner, loop = trained(lambda own: Counting(own, late=3))
    complete_state(loop.optimizer)
    shard = ShardState(loop.optimizer)
    update(inner, range(2), shard)
    with pytest.raises(UnsupportedState, match="Counting keeps more"):
        update(inner, [2], shard)


def test_init_state_fn_makes_state_that_only_megatron_knows():
    def make(optimizer: Any, _: object) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            optimizer.state[parameter].update(step=0, slow=torch.ones(2), kind="slow")

    inner, loop = trained(FirstGradient, init_state_fn=make)
    complete_state(loop.optimizer)
    assert [state["slow"].tolist() for state in inner.optimizer.state.values()] == [[1, 1]] * 2


class OnHost(Tensor):
    """And all that is made of it."""


@pytest.fixture
def a_device(monkeypatch):
    """Have parameters of a model lie on a device, as far as Megatron sees, until they are moved to
    the host."""
    stream = SimpleNamespace(
        wait_stream=lambda other: None,
        record_event=lambda: SimpleNamespace(synchronize=lambda: None, wait=lambda stream: None),
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: torch.no_grad())
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self.as_subclass(OnHost))
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda self: not isinstance(self, OnHost)))


def offloaded(own: Any) -> torch.optim.Optimizer:
    return HybridDeviceOptimizer(
        [{"params": own}],
        offload_fraction=0.6,
        cpu_optimizer_cls=torch.optim.AdamW,
        gpu_optimizer_cls=torch.optim.AdamW,
        param_update_in_fp32=True,
        overlap_cpu_optimizer_d2h_h2d=False,
        pin_cpu_grads=False,
        lr=0.1,
    )


@pytest.mark.usefixtures("a_device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_offloaded_optimizer_continues_exactly(dtype):
    """Megatron's own class: copies in fp32, on the host and on the device, and what two optimizers
    keep for them."""

    def make(own: list[Tensor]) -> torch.optim.Optimizer:
        for parameter in own:
            parameter.data = parameter.data.to(dtype)
        return offloaded(own)

    stock, loop, shard = begun_and_continued(lambda: trained(make)[1])
    (inner,) = loop.optimizer.chained_optimizers
    assert len(inner.optimizer.sub_optimizers) == 2
    if dtype == torch.float32:
        return  # Megatron cannot load what has no other master
    # A load makes new copies, for new optimizers.
    inner.optimizer.load_state_dict(inner.optimizer.state_dict())
    shard.readopt()
    loaded = Slot(loop, shard)
    update(*stock.optimizer.chained_optimizers, range(4, 6))
    for _ in range(2):
        update(inner, range(4, 6), shard)
        assert differences(state_digests(stock), state_digests(loop)) == []
        loaded.restore(loop, shard)


def distributed_whole(*own: Any, **more: Any) -> LayerWiseDistributedOptimizer:
    chain = LayerWiseDistributedOptimizer.__new__(LayerWiseDistributedOptimizer)
    chain.chained_optimizers = list(own)
    vars(chain).update(more)
    return chain


def test_whole_parameters_have_their_owner_as_the_only_replica(monkeypatch):
    """Also where the chain is part of another; parameters of all ranks have all replicas."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(parallel_state, "get_data_parallel_group", lambda **_: None)
    own, everybodys = (trained(KINDS["momentum"])[0] for _ in range(2))
    chain = SimpleNamespace(chained_optimizers=[distributed_whole(own), everybodys])
    assert optimizers.inner_optimizers(chain) == [own, everybodys]
    complete_state(chain)
    assert [part.replicas for part in ShardState(chain).parts] == [(1,), (0, 1)]


@pytest.mark.parametrize("in_buffers", [False, True])
def test_parameters_of_other_owners_are_gathered_after_a_restore(in_buffers):
    calls: list[str] = []
    inner, loop = trained(KINDS["momentum"])
    inner._copy_main_params_to_model_params = lambda: calls.append("masters")
    loop.optimizer = distributed_whole(
        inner, allgather_params=lambda: calls.append("gathered"), use_buffer_param_sync=in_buffers
    )
    (chunk,) = loop.model_chunks
    chunk.start_param_sync = lambda force_sync: calls.append(f"buffers {force_sync}")
    chunk.bucket_groups = chunk.expert_parallel_bucket_groups = []
    dimensions.rebuild_from_peers(loop)
    assert calls == ["masters", "buffers True" if in_buffers else "gathered"]
