"""Data-parallel training with torch's own DistributedDataParallel and AdamW (docs/own-loop.md)."""

import random
from types import SimpleNamespace

import numpy
import torch
import torch.distributed as dist
from deadpool_megatron.megatron import stand_ins
from deadpool_megatron.member import Program, Session, SteppedLoop

stand_ins.install()  # before Megatron: a machine without a GPU

from deadpool_megatron.megatron.identity import state_hash
from megatron.core import parallel_state

ITERATIONS, BATCH = 12, 8


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace()  # where Megatron's models say which precision they use
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(16, 64),
            torch.nn.BatchNorm1d(64),
            torch.nn.GELU(),
            torch.nn.Linear(64, 1),
        )

    def forward(self, inputs):
        return self.layers(inputs)


class Replica(torch.nn.parallel.DistributedDataParallel):
    bucket_groups = expert_parallel_bucket_groups = ()
    force_all_reduce = False

    def zero_grad_buffer(self):
        pass


class Update:
    """One optimizer as the hooks know Megatron's: the torch optimizer is in `optimizer`."""

    def __init__(self, optimizer):
        self.optimizer, self.config = optimizer, SimpleNamespace()

    @property
    def param_groups(self):
        return self.optimizer.param_groups  # a load makes new ones

    def zero_grad(self):
        self.optimizer.zero_grad()

    def step(self):
        self.optimizer.step()


class DdpLoop(SteppedLoop):
    def __init__(self, emit):
        torch.manual_seed(1)  # the same weights everywhere
        # Of no use here, but part of the state that is captured and compared.
        random.seed(1)
        numpy.random.seed(1)
        # init_sync: a spare builds alone, and has nobody to compare its weights with.
        # find_unused_parameters: buckets are the same in the first step as later, and so are sums.
        # broadcast_buffers: each role keeps statistics of its own, and gets its own back.
        self.ddp = Replica(
            Net(), init_sync=False, find_unused_parameters=True, broadcast_buffers=False
        )
        self.model_chunks = [self.ddp]
        self.optimizer = Update(torch.optim.AdamW(self.ddp.parameters(), lr=1e-2))
        self.scheduler = SimpleNamespace(num_steps=0)
        self.counters = {"iteration": 0}
        self.log_sums = {}
        self.emit = emit

    @property
    def done(self):
        return self.counters["iteration"] >= ITERATIONS

    def train_step(self):
        iteration = self.counters["iteration"]
        data = torch.Generator().manual_seed(iteration * dist.get_world_size() + dist.get_rank())
        inputs = torch.randn(BATCH, 16, generator=data)
        loss = (self.ddp(inputs).squeeze(1) - inputs.sum(1)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.num_steps += 1
        self.counters["iteration"] += 1
        total = loss.detach().clone()
        dist.all_reduce(total)
        facts = {
            "iteration": self.counters["iteration"],
            "loss": float(total / dist.get_world_size()).hex(),
            "grad_norm": None,
            "learning_rate": float(self.optimizer.param_groups[0]["lr"]).hex(),
            "skipped": False,
            "samples": self.counters["iteration"] * BATCH * dist.get_world_size(),
        }
        if dist.get_rank() == 0:
            self.emit("step", facts)

    def reset_after_interrupt(self):
        # A backward pass that was left in the middle: torch's own way to begin again.
        self.ddp._update_process_group(dist.group.WORLD)

    def segments_after(self, iteration):
        return ("save",) if iteration == ITERATIONS else ()

    def run_segment(self, name):
        raise ValueError(f"there is no {name}")

    def save_checkpoint(self, directory):
        # Every role has statistics of its own, so every role writes.
        state = [self.ddp.state_dict(), self.optimizer.optimizer.state_dict(), self.counters]
        torch.save(state, directory / f"role-{dist.get_rank()}.pt")

    def load_checkpoint(self, directory):
        model, optimizer, counters = torch.load(directory / f"role-{dist.get_rank()}.pt")
        self.ddp.load_state_dict(model)
        self.optimizer.optimizer.load_state_dict(optimizer)
        self.counters.update(counters)
        self.scheduler.num_steps = self.counters["iteration"]

    def stage_class(self):
        return "replica"

    def state_hash(self):
        return state_hash(self)


class DdpProgram(Program):
    def make_groups(self):
        dist.init_process_group()
        parallel_state.initialize_model_parallel()

    def make_loop(self, emit):
        return DdpLoop(emit)

    def drop_groups(self):
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


torch.set_num_threads(1)
Session.join().run(DdpProgram())
