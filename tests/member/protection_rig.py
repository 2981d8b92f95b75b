"""A protection with a vault and copies that a test controls."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from deadpool_megatron.layout.records import Generation
from deadpool_megatron.member.protection import Protection
from deadpool_megatron.member.role_layout import role_layout
from deadpool_megatron.platform import devices
from deadpool_megatron.settings import Settings
from deadpool_megatron.state.parts import Part

SECONDS = 10.0
EPOCH = 3


class Writer:
    """A slot: bytes by part name."""

    def __init__(self, vault: Vault, generation: Generation) -> None:
        self.generation = generation
        self.parts: dict[str, memoryview] = {}
        self.filled: dict[str, int] = {}
        self.abandoned = False
        self._vault = vault

    def part(self, name: str) -> memoryview:
        return self.parts.setdefault(name, memoryview(bytearray(1 << 17)))

    def fill(self, parts: Mapping[str, int]) -> None:
        if self._vault.refuses_to_fill:
            raise OSError("no vault")
        self.filled = dict(parts)
        self._vault.filled.append(self)

    def abandon(self) -> None:
        self.abandoned = True


class Vault:
    """A fake VaultClient. Everything is committed at once."""

    def __init__(self) -> None:
        self.writers: list[Writer] = []
        self.filled: list[Writer] = []
        self.refuses_to_fill = False

    def register(self, layout: Any, epoch: int, interrupted: int) -> None:
        """Accept any layout."""

    def slot_views(self, names: Sequence[str]) -> list[memoryview]:
        return [writer.part(name) for writer in self.writers[-2:] for name in names]

    def begin(self, generation: Generation, epoch: int) -> Writer:
        self.writers.append(Writer(self, generation))
        return self.writers[-1]

    def wait_committed(self, generation: Generation, boundary: str, **options: Any) -> bool:
        return True


class Copy(devices.CopyHandle):
    """A copy that the test ends."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.error = False

    def done(self) -> bool:
        if self.error:
            raise devices.CopyFailedError("device in error")
        return self.ended.is_set()

    def wait(self, timeout_seconds: float) -> bool:
        self.ended.wait(timeout_seconds)
        return self.done()


class SlowPlatform(devices.CpuPlatform):
    """Copies that the test ends; registered host memory is counted."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[Copy] = []
        self.pinned: list[int] = []

    def side_copy(self, dst: list[torch.Tensor], src: list[torch.Tensor]) -> devices.CopyHandle:
        self.copies.append(Copy())
        return self.copies[-1]

    def register_host_memory(self, memory: torch.Tensor | memoryview) -> None:
        self.pinned.append(id(memory))

    def unregister_host_memory(self, memory: torch.Tensor | memoryview) -> None:
        self.pinned.remove(id(memory))

    def end(self) -> None:
        """End all copies."""
        for copy in self.copies:
            copy.ended.set()


class Rig:
    """A protection with two parts, its vault, and the switch that closes the epoch."""

    def __init__(self, platform: devices.Platform) -> None:
        self.vault = Vault()
        self.closed = 0
        self.warnings: list[str] = []
        self.tensors = [torch.arange(100.0), torch.arange(7.0)]
        parts = [Part(f"shard{i}", [tensor], (0,)) for i, tensor in enumerate(self.tensors)]
        self.protection = Protection(
            vault=self.vault,  # type: ignore[arg-type]
            platform=platform,
            settings=Settings(),
            parts=parts,
            layout=role_layout(0, parts, 128 << 10, [0, 1], 2, "pp0"),
            interrupt_fd=-1,
            closed_epoch=lambda: self.closed,
            report_wait=lambda *_: None,
            pinned=devices.PinnedSlots(platform, self.warnings.append),
        )

    def start(self) -> Rig:
        """Enter the epoch and seal generation 0, as a fresh start does."""
        self.protection.enter(EPOCH)
        self.protection.announce(generation(0), first=True)
        self.protection.complete(b"0")
        self.protection.begin_from(generation(0), "step")
        return self

    def step(self, iteration: int, *, skipped: bool = False) -> None:
        """Train one iteration, as the loop and the hooks of the optimizer do."""
        protection = self.protection
        protection.announce(generation(iteration))
        protection.gate()
        if not skipped:
            for index, tensor in enumerate(self.tensors):
                protection.before_update(index)
                tensor.add_(1)
                protection.after_update(index)
        protection.complete(f"extras {iteration}".encode())

    def settled(self) -> list[Generation]:
        """Return the generations that the vault has got, after the end of all copies."""
        assert self.protection.quiesce(SECONDS)
        return [writer.generation for writer in self.vault.filled]

    def close(self) -> None:
        """Close the epoch, as the watcher thread does."""
        self.closed = EPOCH


def generation(iteration: int) -> Generation:
    return Generation(EPOCH, iteration)


@pytest.fixture
def make():
    rigs: list[Rig] = []

    def build(platform: devices.Platform | None = None) -> Rig:
        rigs.append(Rig(platform or devices.CpuPlatform()))
        return rigs[-1]

    yield build
    for rig in rigs:
        rig.protection.close()
