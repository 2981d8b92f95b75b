"""Protection against a vault in this process: what is copied when, and what each wait waits for."""

import threading
import time
from typing import Any

import pytest
import torch

from deadpool_megatron.comms import EpochClosed
from deadpool_megatron.platform.devices import CpuPlatform, PinnedSlots
from tests.member import protection_rig
from tests.member.protection_rig import SECONDS, Make, Rig, SlowPlatform, Writer, generation

make = protection_rig.make


# The gate (design, section 4).


def test_the_gate_does_not_open_by_itself(make):
    rig = make().start()
    rig.vault.holds_back = True
    passed = threading.Event()

    def commit() -> None:
        while not rig.waits:  # the wait is reported while it lasts, and goes on
            time.sleep(0.001)
        assert not passed.is_set()
        rig.vault.commit.set()

    thread = threading.Thread(target=commit)
    thread.start()
    rig.protection.gate()
    passed.set()
    thread.join(SECONDS)
    assert rig.waits[-1] == (generation(0), True)
    assert rig.protection.stall_seconds > 0


class DeviceBehind(CpuPlatform):
    """Its device comes to what the host has enqueued when the host has looked so many times."""

    def __init__(self, looks: float) -> None:
        super().__init__()
        self.looks = looks
        self.waiting = threading.Event()

    def catch_up(self, timeout_seconds: float) -> bool:
        self.waiting.set()
        self.looks -= 1
        return self.looks < 0


def takes_no_slot(rig: Rig) -> None:
    taken = len(rig.vault.writers)
    with pytest.raises(EpochClosed):
        rig.protection.before_update(0)
    assert len(rig.vault.writers) == taken


def test_a_device_that_hears_nothing_is_left_at_a_close(make):
    platform = DeviceBehind(looks=0)
    rig = make(platform).come_to_update()
    platform.looks = 1e9
    platform.waiting.clear()
    closer = rig.close_when(platform.waiting)
    takes_no_slot(rig)
    closer.join()


# What is copied.


@pytest.mark.parametrize("skipped", [False, True])
def test_a_generation_holds_what_each_update_left(make, skipped):
    """Traps, A5: no hook of an inner optimizer fires for a skipped one."""
    rig = make().start()
    rig.step(1, skipped=skipped)
    wanted = [tensor.clone() for tensor in rig.tensors]
    assert rig.settled() == [generation(0), generation(1)]
    slot = rig.vault.filled[-1]
    for index, tensor in enumerate(wanted):
        found = torch.frombuffer(slot.part(f"shard{index}"), dtype=torch.float32)
        assert torch.equal(found[: tensor.numel()], tensor)
    assert set(slot.filled) == {"shard0", "shard1", "extras@step"}
    assert bytes(slot.part("extras@step")[: slot.filled["extras@step"]]) == b"extras 1"


# The cadence: only some generations are due.


def thin(make: Make, every: int, **settings: Any) -> Rig:
    """An epoch of that cadence, from generation 0."""
    rig = make(**settings)
    return rig.start(every)


@pytest.mark.parametrize(("lag", "wanted"), [(0, [0, 0, 3, 6]), (1, [0, 0, 0, 3])])
def test_only_due_iterations_take_slots_and_wait_for_commits(make, lag, wanted):
    """And the first one, whose state may be in memory once only."""
    rig = thin(make, 3, max_lag=lag)
    rig.vault.asked.clear()
    for iteration in range(1, 11):
        rig.protection.announce(generation(iteration))
        assert rig.protection.is_due == (iteration % 3 == 0)
        rig.step(iteration)
    assert rig.settled() == [generation(iteration) for iteration in (0, 3, 6, 9)]
    assert [asked[0].iteration for asked in rig.vault.asked] == wanted


# Boundaries (traps, A9).


# Page-locked slots on a device.


def test_a_driver_that_does_not_lock_memory_costs_speed_only(make):
    class Refusing(SlowPlatform):
        def register_host_memory(self, memory: torch.Tensor | memoryview) -> None:
            if self.pinned:
                raise RuntimeError("CUDA error: out of memory\nmore lines")
            super().register_host_memory(memory)

    platform = Refusing()
    platform.is_cuda = True
    rig = make(platform)
    pinned = PinnedSlots(platform, rig.warnings.append)
    for writer in (Writer(rig.vault, generation(0)), Writer(rig.vault, generation(1))):
        pinned.pin(writer.part(name) for name in rig.protection.copied_parts)
    assert len(platform.pinned) == 1
    (text,) = rig.warnings
    assert "(CUDA error: out of memory)" in text
    assert "ulimit -l" in text
    pinned.release()
    assert platform.pinned == []
