"""Where the parts run: on NCCL and CUDA, or rehearsed on the CPU with the fake NCCL."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Device(StrEnum):
    """What the command line calls the two."""

    CUDA = "cuda"
    CPU = "cpu"

    @property
    def communicator(self) -> str:
        """The kind of communicators, as settings name it."""
        return "nccl" if self is Device.CUDA else "fake-nccl"

    def environment(self, number: int) -> dict[str, str]:
        """Returns what process or node ``number`` gets beside the environment that is there.

        Several ranks share a GPU: with a host identity each, NCCL takes them for processes of
        different hosts, and with no path through memory it talks through sockets on loopback.
        """
        if self is Device.CPU:
            return {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        return {
            "CUDA_VISIBLE_DEVICES": _gpu(number, os.environ),
            "NCCL_HOSTID": f"deadpool-proof-{number}",
            "NCCL_P2P_DISABLE": "1",
            "NCCL_SHM_DISABLE": "1",
            "NCCL_IB_DISABLE": "1",
            "NCCL_SOCKET_IFNAME": "lo",
            # One order of sums, as far as NCCL and cuBLAS let us have it.
            "NCCL_ALGO": "Ring",
            "NCCL_PROTO": "Simple",
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        }


def _gpu(number: int, environment: Mapping[str, str]) -> str:
    """The GPU of process ``number``; they are dealt out in turns."""
    from deadpool_megatron.preflight.gpus import visible_gpus

    seen = visible_gpus(environment)
    return seen[number % len(seen)] if seen else ""


@dataclass(frozen=True)
class Size:
    """How much of each thing a part does."""

    ranks: int
    spares: int
    groups: int
    kills: int
    iterations: int
    rounds: int

    @classmethod
    def of(cls, device: Device) -> Size:
        """The real size on a GPU; on the CPU as little as shows that the kit works."""
        if device is Device.CUDA:
            return cls(ranks=4, spares=3, groups=20, kills=50, iterations=30, rounds=3)
        return cls(ranks=3, spares=1, groups=5, kills=2, iterations=8, rounds=1)
