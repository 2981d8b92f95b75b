"""The device of the parts: NCCL and CUDA, or for a rehearsal the fake of the tests on the CPU."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum


class Device(StrEnum):
    """The values of ``--device``."""

    CUDA = "cuda"
    CPU = "cpu"

    @property
    def communicator(self) -> str:
        """The value of the setting ``communicator``."""
        return "nccl" if self is Device.CUDA else "fake_nccl:FakeNcclFabric"

    def environment(self, number: int) -> dict[str, str]:
        """Return the variables that process or node ``number`` gets in addition to its environment.

        Several ranks share a GPU: with a host identity each, NCCL takes them for processes of
        different hosts, and without a path through memory it uses sockets on loopback.
        """
        from deadpool_megatron.preflight.host import GPU_VARIABLE, visible_gpus

        if self is Device.CPU:
            return {GPU_VARIABLE: "", "OMP_NUM_THREADS": "1"}
        seen = visible_gpus(os.environ)  # assigned round-robin
        return {
            GPU_VARIABLE: seen[number % len(seen)] if seen else "",
            "NCCL_HOSTID": f"deadpool-proof-{number}",
            "NCCL_P2P_DISABLE": "1",
            "NCCL_SHM_DISABLE": "1",
            "NCCL_IB_DISABLE": "1",
            "NCCL_SOCKET_IFNAME": "lo",
            # A fixed order of sums, as far as NCCL and cuBLAS allow it.
            "NCCL_ALGO": "Ring",
            "NCCL_PROTO": "Simple",
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            # Compilation at first use would take longer than a part has.
            "TORCHDYNAMO_DISABLE": "1",
        }


def set_up(device: Device) -> None:
    """Set the environment of a part's process, which sees all GPUs and assigns them."""
    from deadpool_megatron.preflight.host import GPU_VARIABLE
    from deadpool_megatron.support import environment as nccl_environment

    given = device.environment(0)
    if device is Device.CUDA:
        del given[GPU_VARIABLE], given["NCCL_HOSTID"]
    os.environ.update(given)
    nccl_environment.complete(os.environ)


def take_world(device: Device) -> None:
    """Initialize torch.distributed in this process, as a world of one rank on its device."""
    import torch.distributed as dist

    from deadpool_megatron.megatron import stand_ins

    stand_ins.install()
    from deadpool_megatron.comms import Communicators
    from deadpool_megatron.member.member_device import select_device

    kind = select_device("nccl" if device is Device.CUDA else "gloo", 0)
    os.environ.update(RANK="0", WORLD_SIZE="1")
    Communicators(kind).install()
    dist.init_process_group()


@dataclass(frozen=True)
class Size:
    """How often a part does each thing; its limit may end it before."""

    kills: int
    iterations: int


#: on the CPU only enough to show that the kit works
SIZES = {
    Device.CUDA: Size(kills=3, iterations=12),
    Device.CPU: Size(kills=1, iterations=8),
}
