"""Fully sharded training with torch's fully_shard (FSDP2) and AdamW (docs/own-loop.md)."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from deadpool_megatron.member import Session
from deadpool_megatron.torch_native import TorchLoop, TorchProgram

ITERATIONS, BATCH = 12, 8


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)
        self.dropout = torch.nn.Dropout(0.1)

    def forward(self, inputs):
        return inputs + self.dropout(self.down(torch.relu(self.up(self.norm(inputs)))))


class FsdpLoop(TorchLoop):
    def __init__(self, emit):
        super().__init__(emit, ITERATIONS, seed=1, save_interval=6)  # the same weights everywhere
        blocks = [Block(33) for _ in range(3)]
        self.model = torch.nn.Sequential(torch.nn.Linear(16, 33), *blocks, torch.nn.Linear(33, 1))
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, ITERATIONS)
        torch.manual_seed(dist.get_rank())  # each role has its own dropout

    def iterate(self):
        # The counters determine the data, so no position in the data is saved.
        seed = self.counters["iteration"] * dist.get_world_size() + dist.get_rank()
        inputs = torch.randn(BATCH, 16, generator=torch.Generator().manual_seed(seed))
        loss = (self.model(inputs).squeeze(1) - inputs.sum(1)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        return loss


torch.set_num_threads(1)
Session.join().run(TorchProgram(FsdpLoop))
