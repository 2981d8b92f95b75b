"""Data-parallel training with torch's DistributedDataParallel and AdamW (docs/own-loop.md)."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from deadpool_megatron.member import Session
from deadpool_megatron.torch_native import TorchLoop, TorchProgram

ITERATIONS, BATCH = 12, 8


def net():
    return torch.nn.Sequential(
        torch.nn.Linear(16, 64),
        torch.nn.BatchNorm1d(64),
        torch.nn.GELU(),
        torch.nn.Linear(64, 1),
    )


class DdpLoop(TorchLoop):
    def __init__(self, emit):
        super().__init__(emit, ITERATIONS, seed=1, save_interval=6)  # the same weights everywhere
        # init_sync: a spare builds alone, without a peer to compare weights with.
        # find_unused_parameters: gradient buckets, and so sums, are equal in the first and in later
        # steps.
        # broadcast_buffers: each role keeps and restores its own statistics.
        self.model = DistributedDataParallel(
            net(), init_sync=False, find_unused_parameters=True, broadcast_buffers=False
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, ITERATIONS)

    def iterate(self):
        # The counters determine the data, so no position in the data is saved.
        seed = self.counters["iteration"] * dist.get_world_size() + dist.get_rank()
        inputs = torch.randn(BATCH, 16, generator=torch.Generator().manual_seed(seed))
        loss = (self.model(inputs).squeeze(1) - inputs.sum(1)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss


torch.set_num_threads(1)
Session.join().run(TorchProgram(DdpLoop))
