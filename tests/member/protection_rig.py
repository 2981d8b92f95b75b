"""A protection whose vault and copies a test plays."""

from __future__ import annotations

import dataclasses
import os
import select
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from deadpool_megatron.layout.records import Generation
from deadpool_megatron.member.protection import Protection
from deadpool_megatron.member.role_layout import role_layout
from deadpool_megatron.platform import devices
from deadpool_megatron.settings import Settings
from deadpool_megatron.state.parts import Part
from deadpool_megatron.vault.errors import Frozen, Interrupted

SECONDS = 10.0
EPOCH = 3
Asked = tuple[Generation, str]


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
    """Plays VaultClient. Everything is committed at once unless ``holds_back``."""

    def __init__(self) -> None:
        self.registered: list[int] = []
        self.writers: list[Writer] = []
        self.filled: list[Writer] = []
        self.appended: list[tuple[Generation, str, bytes]] = []
        self.asked: list[Asked] = []
        self.holds_back = False
        self.frozen = False
        self.refuses_to_fill = False
        self.waiting = threading.Event()
        self.commit = threading.Event()

    def register(self, layout: Any, epoch: int, interrupted: int | None = None) -> None:
        if interrupted is not None and select.select([interrupted], [], [], 0)[0]:
            raise Interrupted("interrupted while waiting for register")
        self.registered.append(epoch)

    def slot_views(self, names: Sequence[str]) -> list[memoryview]:
        return [writer.part(name) for writer in self.writers[-2:] for name in names]

    def begin(self, generation: Generation, epoch: int) -> Writer:
        self._check()
        self.writers.append(Writer(self, generation))
        return self.writers[-1]

    def append(self, generation: Generation, part_name: str, payload: bytes) -> None:
        self._check()
        self.appended.append((generation, part_name, payload))

    def wait_committed(
        self, generation: Generation, boundary: str, *, interrupted: int, **options: Any
    ) -> bool:
        self.asked.append((generation, boundary))
        self.waiting.set()
        while self.holds_back and not self.commit.is_set():
            if select.select([interrupted], [], [], 0.005)[0]:
                return False
            options["on_wait"](0.005)
        return True

    def _check(self) -> None:
        self.waiting.set()
        if self.frozen:
            raise Frozen("the epoch has been closed")


class Copy(devices.CopyHandle):
    """A copy that ends when it is told to."""

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
    """Copies end when the test says so; host memory can be registered and is counted."""

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
        """End all copies that have begun."""
        for copy in self.copies:
            copy.ended.set()


class Rig:
    """A protection with two parts, its vault, and the switch that closes the epoch."""

    def __init__(self, platform: devices.Platform, **settings: Any) -> None:
        self.vault = Vault()
        self.closed = 0
        self.interrupt_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.waits: list[tuple[Generation, bool]] = []
        self.warnings: list[str] = []
        self.tensors = [torch.arange(100.0), torch.arange(7.0)]
        parts = [Part(f"shard{i}", [tensor], (0,)) for i, tensor in enumerate(self.tensors)]
        updates = settings.pop("updates", None)
        quick = {"close_seconds": 0.5, **settings}
        self.settings = dataclasses.replace(Settings(), **quick)
        self.protection = Protection(
            vault=self.vault,  # type: ignore[arg-type]
            platform=platform,
            settings=self.settings,
            parts=parts,
            layout=role_layout(0, parts, 128 << 10, [0, 1], 2 + self.settings.max_lag, "pp0"),
            interrupt_fd=self.interrupt_fd,
            closed_epoch=lambda: self.closed,
            report_wait=lambda g, seconds, over: self.waits.append((g, over)),
            pinned=devices.PinnedSlots(platform, self.warnings.append),
            updates=updates,
        )

    def start(self, every: int = 1) -> Rig:
        """Enter the epoch and seal generation 0, as a fresh start does."""
        self.protection.enter(EPOCH, every)
        self.protection.announce(generation(0), first=True)
        self.protection.complete(b"0")
        self.protection.begin_from(generation(0), "step")
        return self

    def step(self, iteration: int, *, skipped: bool = False) -> None:
        """One iteration as the loop and the optimizer hooks go through it."""
        protection = self.protection
        protection.announce(generation(iteration))
        protection.gate()
        if not skipped:
            for index, tensor in enumerate(self.tensors):
                protection.before_update(index)
                tensor.add_(1)
                protection.after_update(index)
        if protection.is_due:
            protection.complete(f"extras {iteration}".encode())

    def come_to_update(self) -> Rig:
        """Seal generation 0, and come through the gate of the first iteration."""
        self.start()
        self.settled()
        self.protection.announce(generation(1))
        self.protection.gate()
        return self

    def settled(self) -> list[Generation]:
        """What was handed to the vault so far, after everything under way has ended."""
        assert self.protection.quiesce(SECONDS)
        return [writer.generation for writer in self.vault.filled]

    def close(self) -> None:
        """What the watcher thread does when the epoch is closed."""
        self.closed = EPOCH
        os.eventfd_write(self.interrupt_fd, 1)

    def leave(self) -> None:
        """What the link does when the member goes on to the next epoch."""
        os.eventfd_read(self.interrupt_fd)

    def close_when(self, event: threading.Event) -> threading.Thread:
        """Close from another thread, once the main one waits."""

        def run() -> None:
            assert event.wait(SECONDS)
            self.close()

        thread = threading.Thread(target=run)
        thread.start()
        return thread


# A platform, or that of the CPU, and settings -> a rig.
Make = Callable[..., Rig]


def generation(iteration: int) -> Generation:
    return Generation(EPOCH, iteration)


@pytest.fixture
def make():
    rigs: list[Rig] = []

    def build(platform: devices.Platform | None = None, **settings: Any) -> Rig:
        rigs.append(Rig(platform or devices.CpuPlatform(), **settings))
        return rigs[-1]

    yield build
    for rig in rigs:
        rig.protection.close()
        os.close(rig.interrupt_fd)
