"""Loops on plain PyTorch are interrupted in the middle of a pass, in real processes, and restored:
they continue bit for bit as an undisturbed loop does."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from deadpool_megatron.state import extras
from deadpool_megatron.state.optimizer_state import UnsupportedState
from deadpool_megatron.torch_native import TorchLoop, TorchProgram
from deadpool_megatron.torch_native.framework import TorchFramework
from tests.comms.ranks import Member, run


class Interrupt(BaseException):
    """Stands for EpochClosed."""


def layers() -> torch.nn.Sequential:
    return torch.nn.Sequential(
        torch.nn.Linear(6, 9), torch.nn.BatchNorm1d(9), torch.nn.Dropout(0.2), torch.nn.Linear(9, 1)
    )


def replicated(model: torch.nn.Sequential) -> torch.nn.Module:
    return DistributedDataParallel(
        model, init_sync=False, find_unused_parameters=True, broadcast_buffers=False
    )


def sharded(model: torch.nn.Sequential, *shape: int) -> torch.nn.Module:
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


KINDS: dict[str, Callable[[torch.nn.Sequential], torch.nn.Module]] = {
    "ddp": replicated,
    "fsdp": lambda model: sharded(model, 4),
    "hsdp": lambda model: sharded(model, 2, 2),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda own: torch.optim.AdamW(own, 0.1),
    "momentum": lambda own: torch.optim.SGD(own, 0.1, momentum=0.9),
    "amsgrad": lambda own: torch.optim.Adam(own, 0.1, amsgrad=True),
}


class Loop(TorchLoop):
    def __init__(self, kind: str, optimizer: str) -> None:
        super().__init__(lambda kind, facts: self.losses.append(facts["loss"]), 6, seed=1)
        self.losses: list[str] = []
        model = layers()
        model[1].register_forward_hook(self._interrupt)
        self.model = KINDS[kind](model)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4])
        self.grad_scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        self.interrupted = ""
        torch.manual_seed(dist.get_rank())

    def iterate(self) -> torch.Tensor:
        seed = self.counters["iteration"] * dist.get_world_size() + dist.get_rank()
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
        features = self.model(inputs)
        self.optimizer.zero_grad()
        self.grad_scaler.scale(features.square().sum()).backward()
        self.grad_scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if self.interrupted == "update":
            raise Interrupt
        self.grad_scaler.step(self.optimizer)
        self.grad_scaler.update()
        self.scheduler.step()
        return features.sum()

    def _interrupt(self, module: object, inputs: object, outputs: torch.Tensor) -> None:
        """In the backward pass, when the last layer has its gradients and none is reduced."""

        def interrupt(_: torch.Tensor) -> torch.Tensor:
            raise Interrupt

        if self.interrupted == "backward":
            outputs.register_hook(interrupt)


class Slot:
    """The state of a role, as in a slot."""

    def __init__(self, framework: TorchFramework) -> None:
        self.tensors = [tensor.clone() for part in framework.parts for tensor in part.tensors]
        self.extras = extras.encode(framework.capture())

    def restore(self, framework: TorchFramework) -> None:
        framework.forget_in_flight()
        live = [tensor for part in framework.parts for tensor in part.tensors]
        for tensor, kept in zip(live, self.tensors, strict=True):
            tensor.copy_(kept)
        values = extras.decode(self.extras)
        framework.restore(values)
        framework.synchronise()
        framework.restore_last(values)


def trained(loop: TorchLoop, iterations: int) -> str:
    while loop.counters["iteration"] < iterations:
        loop.train_step()
    return loop.state_hash()


def life(member: Member, directory: Path, kind: str, optimizer: str) -> dict[str, Any]:
    member.comms.install()
    program = TorchProgram(lambda emit: Loop(kind, optimizer))
    os.environ["WORLD_SIZE"] = str(member.size)
    for role in [0, 3] if member.rank == 3 else [member.rank]:  # a spare may be built for others
        os.environ["RANK"] = str(role)
        program.make_groups()
        loop = program.make_loop(print)
        if role != member.rank:
            program.framework(loop)
            loop.warm_up()
            program.drop_groups()
    assert isinstance(loop, Loop)
    undisturbed = Loop(kind, optimizer)
    TorchFramework(undisturbed)
    framework = TorchFramework(loop)
    pristine = Slot(framework)
    loop.warm_up()  # without peers, as a spare
    member.attach(0)
    random = torch.get_rng_state()
    wanted = [trained(undisturbed, iterations) for iterations in (3, 6)]
    torch.set_rng_state(random)
    pristine.restore(framework)
    framework.verify()
    torch.set_rng_state(random)
    loop.losses.clear()
    hashes = [trained(loop, 3)]
    third = Slot(framework)
    loop.save_checkpoint(directory)
    for place in ("backward", "update"):
        third.restore(framework)
        trained(loop, 5)
        loop.interrupted = place
        with pytest.raises(Interrupt):
            loop.train_step()
        loop.interrupted = ""
        third.restore(framework)
        framework.verify()
        hashes += [loop.state_hash(), trained(loop, 6)]
    loop.load_checkpoint(directory)
    framework.readopt()
    framework.restore_last(extras.decode(third.extras))
    hashes.append(loop.state_hash())
    return {
        "equal": hashes == [wanted[0], *wanted, *wanted, wanted[0]],
        "losses": loop.losses[-3:] == undisturbed.losses[-3:],
        "replicas": framework.parts[0].replicas,
        "meaning": framework.parts[0].signature(),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "optimizer"), [("ddp", "amsgrad"), ("fsdp", "adamw"), ("hsdp", "momentum")]
)
def test_interrupted_loop_continues_bit_for_bit(tmp_path, kind, optimizer):
    found = run(4, life, tmp_path, kind, optimizer)
    assert all(role["equal"] and role["losses"] for role in found.values()), found
    replicas = {
        "ddp": [(0, 1, 2, 3)] * 4,
        "fsdp": [(0,), (1,), (2,), (3,)],
        "hsdp": [(0, 2), (1, 3), (0, 2), (1, 3)],
    }
    assert [role["replicas"] for role in found.values()] == replicas[kind]
    # Equal bytes, and only these, have equal names.
    assert len({role["meaning"] for role in found.values()}) == len(set(replicas[kind]))


def refused(member: Member) -> list[str]:
    member.init()

    class Odd(Loop):
        def __init__(self, wrap: Any, make: Any = OPTIMIZERS["adamw"]) -> None:
            super().__init__("ddp", "adamw")
            model = layers()
            self.model, self.optimizer = wrap(model), make(model.parameters())

    class Fsdp1(torch.distributed.fsdp.FullyShardedDataParallel):
        def __init__(self, _: torch.nn.Module) -> None:
            torch.nn.Module.__init__(self)  # the other needs a GPU

    other = torch.nn.Linear(2, 2)
    zero = type("Zero", (torch.optim.AdamW,), {"__module__": "torch.distributed.optim.zero"})
    cases = [
        (DistributedDataParallel,),
        (Fsdp1,),
        (replicated, zero),
        (replicated, lambda own: torch.optim.AdamW(other.parameters())),
        (replicated, lambda own: torch.optim.Rprop(own)),
    ]
    found = []
    for case in cases:
        try:
            TorchFramework(Odd(*case))
        except UnsupportedState as error:
            found.append(str(error))
    return found


def test_state_that_cannot_be_restored_is_refused():
    buckets, fsdp1, zero, stranger, first = run(1, refused)[0]
    assert "find_unused_parameters=True" in buckets
    assert "fully_shard" in fsdp1
    assert "Zero does not keep its state" in zero
    assert "model does not have" in stranger
    assert "Rprop makes its state of its first gradient" in first
