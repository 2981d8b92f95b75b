"""The place of the parts: NCCL and CUDA, or the fake of the tests on the CPU, to rehearse."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum


class Device(StrEnum):
    """What the command line calls the two."""

    CUDA = "cuda"
    CPU = "cpu"

    @property
    def communicator(self) -> str:
        """The kind of communicators, as settings name it."""
        return "nccl" if self is Device.CUDA else "fake_nccl:FakeNcclFabric"

    def environment(self, number: int) -> dict[str, str]:
        """Returns what process or node ``number`` gets beside the environment that is there.

        Several ranks share a GPU: with a host identity each, NCCL takes them for processes of
        different hosts, and with no path through memory it talks through sockets on loopback.
        """
        from deadpool_megatron.preflight.host import VISIBLE, visible_gpus

        if self is Device.CPU:
            return {VISIBLE: "", "OMP_NUM_THREADS": "1"}
        seen = visible_gpus(os.environ)  # dealt out in turns
        return {
            VISIBLE: seen[number % len(seen)] if seen else "",
            "NCCL_HOSTID": f"deadpool-proof-{number}",
            "NCCL_P2P_DISABLE": "1",
            "NCCL_SHM_DISABLE": "1",
            "NCCL_IB_DISABLE": "1",
            "NCCL_SOCKET_IFNAME": "lo",
            # One order of sums, as far as NCCL and cuBLAS let us have it.
            "NCCL_ALGO": "Ring",
            "NCCL_PROTO": "Simple",
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            # Nothing is compiled at first use: that would take longer than a part has.
            "TORCHDYNAMO_DISABLE": "1",
        }


def set_up(device: Device) -> None:
    """The environment of the process of a part: it sees all GPUs, and deals them out."""
    from deadpool_megatron.preflight.host import VISIBLE
    from deadpool_megatron.support import environment as nccl_environment

    given = device.environment(0)
    if device is Device.CUDA:
        del given[VISIBLE], given["NCCL_HOSTID"]
    os.environ.update(given)
    nccl_environment.complete(os.environ)


def take_world(device: Device) -> None:
    """This process becomes a world of one rank, on its device."""
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
    """How much of each thing a part does; the limit of a part may end it before."""

    kills: int
    rounds: int
    groups: int
    iterations: int


#: the real one on a GPU; on the CPU as little as shows that the kit works
SIZES = {
    Device.CUDA: Size(kills=5, rounds=50, groups=12, iterations=12),
    Device.CPU: Size(kills=1, rounds=1, groups=5, iterations=8),
}
