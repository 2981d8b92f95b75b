"""Protection with its helper thread, against a vault in this process; see also calls/."""

import threading
import time

import pytest
import torch

from deadpool_megatron.comms import EpochClosed
from deadpool_megatron.member.protection import ProtectionError
from deadpool_megatron.platform.devices import PinnedSlots
from tests.member import protection_rig
from tests.member.protection_rig import EPOCH, SECONDS, SlowPlatform, Writer, generation

make = protection_rig.make


@pytest.mark.parametrize("skipped", [False, True])
def test_generation_holds_the_state_after_each_update(make, skipped):
    """Traps, A5: no hook of an inner optimizer fires for a skipped update."""
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


def test_protection_leaves_a_copy_that_still_reads(make):
    platform = SlowPlatform()
    rig = make(platform).start()
    thread = threading.Timer(0.05, rig.close)
    thread.start()
    with pytest.raises(EpochClosed, match="copy of a generation"):
        rig.protection.gate()
    thread.join(SECONDS)
    assert not rig.protection.quiesce(0.05), "the copies still read"
    platform.end()
    assert rig.protection.quiesce(SECONDS)
    assert rig.vault.filled == []
    assert rig.vault.writers[-1].abandoned


def test_quiesce_has_a_common_deadline_for_all_copies(make):
    rig = make(SlowPlatform())
    rig.protection.enter(EPOCH)
    rig.protection.announce(generation(1))
    rig.protection.after_update(0)
    rig.protection.after_update(1)
    started = time.monotonic()
    assert not rig.protection.quiesce(0.2)
    assert time.monotonic() - started < 0.35


def test_gate_reports_a_slot_that_could_not_be_handed_over(make):
    rig = make()
    rig.vault.refuses_to_fill = True
    rig.start()
    with pytest.raises(ProtectionError, match="was not handed over: no vault"):
        rig.protection.gate()
    rig.vault.refuses_to_fill = False
    rig.close()
    with pytest.raises(EpochClosed):
        rig.protection.gate()
    rig.protection.enter(EPOCH + 1)
    rig.protection.gate()


def test_helper_threads_end_with_their_role(make):
    for _ in range(5):
        rig = make().start()
        rig.step(1)
        rig.protection.close()
    names = [thread.name for thread in threading.enumerate()]
    assert "deadpool-sealer" not in names


def test_refusal_to_lock_memory_costs_speed_only(make):
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
