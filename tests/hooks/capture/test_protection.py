"""Protection against a vault in this process: what is copied when, and what each wait waits for."""

import threading
import time
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from deadpool_megatron.comms import EpochClosed
from deadpool_megatron.hooks import dimensions
from deadpool_megatron.hooks.capture.protection import ExtrasOutgrown, UpdateCapture
from deadpool_megatron.layout.records import EpochRecord, Generation, Restore
from deadpool_megatron.platform.devices import CopyHandle, CpuPlatform, PinnedSlots
from deadpool_megatron.state.packing import Part
from tests.hooks.capture import protection_rig
from tests.hooks.capture.protection_rig import (
    EPOCH,
    SECONDS,
    Make,
    Rig,
    SlowPlatform,
    Writer,
    generation,
)
from tests.hooks.session_rig import BareEntry

make = protection_rig.make


def test_a_checkpoint_becomes_a_generation_at_the_boundary_that_it_includes(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or an evaluation that is in it would be done twice after the next failure."""
    rig = make()
    entry = BareEntry(
        generation=generation(6),
        boundary="save",
        capture_extras=lambda: b"after the save",
        _built=Mock(protection=rig.protection, frozen=None),
    )
    rig.protection.enter(EPOCH)
    restore = Restore("durable", generation(6), "save", "somewhere")
    monkeypatch.setattr(dimensions, "verify", lambda *_: None)
    entry.verify(EpochRecord(EPOCH, {}, {}, restore), 0)
    rig.step(7)
    first = rig.vault.filled[0]
    assert {name for name in first.filled if "@" in name} == {"extras@save"}
    assert bytes(first.parts["extras@save"][:14]) == b"after the save"
    assert rig.vault.asked == [(generation(6), "save")]


# The gate (design, section 4).


@pytest.mark.parametrize(("lag", "wanted"), [(0, [0, 1, 2]), (1, [0, 0, 1]), (2, [0, 0, 0])])
def test_an_update_waits_for_the_commit_that_lies_the_lag_behind(
    make: Make, lag: int, wanted: list[int]
) -> None:
    """The first update waits for generation 0 whatever the lag: it must exist twice by then."""
    rig = make(max_lag=lag).start()
    for iteration in (1, 2, 3):
        rig.step(iteration)
    assert [asked[0].iteration for asked in rig.vault.asked] == wanted
    rig.protection.settle()
    assert rig.vault.asked[-1] == (generation(3), "step")


@pytest.mark.parametrize("lag", [0, 2])
def test_after_a_restore_the_first_update_waits_for_reprotection(make: Make, lag: int) -> None:
    rig = make(max_lag=lag)
    rig.protection.enter(EPOCH)
    restored = Generation(1, 41)
    rig.protection.owe(restored, "evaluation")
    rig.step(42)
    assert rig.vault.asked == [(restored, "evaluation")]


def test_the_gate_does_not_open_by_itself(make: Make) -> None:
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


def test_a_slot_is_taken_when_the_device_has_heard_from_every_role(make: Make) -> None:
    """Where Megatron leaves the gradient norm on the device, nothing else holds the host."""
    platform = DeviceBehind(looks=0)
    rig = make(platform).come_to_update()
    platform.looks, taken = 3, len(rig.vault.writers)
    original = rig.vault.begin

    def begin(*args: Any) -> Writer:
        assert platform.looks < 0, "the slot was taken before the device had come that far"
        return original(*args)

    rig.vault.begin = begin  # type: ignore[method-assign]
    rig.protection.using(0)
    assert len(rig.vault.writers) == taken + 1, "before the update, not after it"
    platform.looks = 1e9
    rig.protection.using(1)
    assert len(rig.vault.writers) == taken + 1, "once for an iteration"


def takes_no_slot(rig: Rig) -> None:
    taken = len(rig.vault.writers)
    with pytest.raises(EpochClosed):
        rig.protection.using(0)
    assert len(rig.vault.writers) == taken


def test_a_device_that_hears_nothing_is_left_at_a_close(make: Make) -> None:
    platform = DeviceBehind(looks=0)
    rig = make(platform).come_to_update()
    platform.looks = 1e9
    platform.waiting.clear()
    closer = rig.close_when(platform.waiting)
    takes_no_slot(rig)
    closer.join()


def test_an_abort_lets_the_device_go_on_and_proves_nothing(make: Make) -> None:
    class Aborted(DeviceBehind):
        def catch_up(self, timeout_seconds: float) -> bool:
            if self.looks:
                rig.close()
            return True

    platform = Aborted(looks=0)
    rig = make(platform).come_to_update()
    platform.looks = 1
    takes_no_slot(rig)


def test_warming_up_protects_nothing(make: Make) -> None:
    rig = make()
    rig.protection.gate()
    rig.protection.fence()
    rig.protection.updated(0)
    assert rig.vault.asked == []
    assert rig.vault.writers == []


# What is copied.


@pytest.mark.parametrize("skipped", [False, True])
def test_a_generation_holds_what_each_update_left(make: Make, skipped: bool) -> None:
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


def test_a_second_update_of_one_iteration_is_what_its_generation_holds(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program may step its optimizer twice; what the first step has left is no generation."""
    platform = SlowPlatform()
    rig = make(platform)
    waited: list[CopyHandle] = []

    def wait(copy: protection_rig.Copy, _: float) -> bool:
        waited.append(copy)
        return True

    monkeypatch.setattr(protection_rig.Copy, "wait", wait)
    rig.protection.enter(EPOCH)
    rig.protection.announce(generation(1))
    for number in range(2):
        rig.protection.gate()
        rig.protection.using(0)
        assert waited == platform.copies, "none reads what is overwritten now"
        rig.protection.updated(0)
        assert len(platform.copies) == number + 1


def test_a_role_without_optimizer_state_seals_its_extras(make: Make) -> None:
    rig = make()
    rig.tensors.clear()
    rig.protection._parts.clear()
    rig.start()
    rig.step(1)
    assert rig.settled() == [generation(0), generation(1)]
    assert set(rig.vault.filled[-1].filled) == {"extras@step"}


def test_one_generation_at_a_time_even_without_a_gate(make: Make) -> None:
    platform = SlowPlatform()
    rig = make(platform).start()
    handed = threading.Thread(target=lambda: rig.protection.complete(b"again"))
    rig.protection.announce(generation(1))
    handed.start()
    handed.join(0.1)
    assert handed.is_alive(), "the first one is still being copied"
    while handed.is_alive():
        platform.end()
        handed.join(0.01)
    platform.end()
    assert rig.settled() == [generation(0), generation(1)]


def test_extras_that_outgrow_their_room_are_refused(make: Make) -> None:
    rig = make().start()
    room = rig.protection.layout.parts[-1].nbytes
    with pytest.raises(ExtrasOutgrown, match="--deadpool-extras-room-mb 1"):
        rig.protection.complete(bytes(room + 1))
    with pytest.raises(ExtrasOutgrown, match=f"{room + 1} bytes, there is room for {room}"):
        rig.protection.append(generation(0), "save", bytes(room + 1))


# The cadence: only some generations are due.


def thin(make: Make, every: int, **settings: Any) -> Rig:
    """An epoch of that cadence, from generation 0."""
    rig = make(**settings)
    return rig.start(every)


@pytest.mark.parametrize(("lag", "wanted"), [(0, [0, 0, 3, 6]), (1, [0, 0, 0, 3])])
def test_only_due_iterations_take_slots_and_wait_for_commits(
    make: Make, lag: int, wanted: list[int]
) -> None:
    """And the first one, whose state may be in memory once only."""
    rig = thin(make, 3, max_lag=lag)
    rig.vault.asked.clear()
    for iteration in range(1, 11):
        rig.protection.announce(generation(iteration))
        assert rig.protection.is_wanted == (iteration % 3 == 0)
        rig.step(iteration)
    assert rig.settled() == [generation(iteration) for iteration in (0, 3, 6, 9)]
    assert [asked[0].iteration for asked in rig.vault.asked] == wanted


def test_it_knows_whether_an_iteration_has_passed_the_gate(make: Make) -> None:
    rig = make().start()
    for iteration in (1, 2):
        rig.protection.announce(generation(iteration))
        assert not rig.protection.is_gated
        rig.protection.gate()
        assert rig.protection.is_gated


def test_the_first_generation_of_a_line_is_due_whatever_its_number(make: Make) -> None:
    rig = make()
    rig.protection.enter(EPOCH, 5)
    rig.protection.announce(generation(7), first=True)
    assert rig.protection.is_wanted
    rig.protection.announce(generation(8))
    assert not rig.protection.is_wanted


def test_segments_count_for_due_and_restored_generations_only(make: Make) -> None:
    rig = thin(make, 2)
    assert rig.protection.holds(generation(0))
    rig.step(1)
    assert not rig.protection.holds(generation(1))
    rig.step(2)
    assert rig.protection.holds(generation(2))
    assert not rig.protection.holds(generation(0))
    restored = Generation(1, 41)
    rig.protection.enter(EPOCH + 1, 2)
    rig.protection.owe(restored, "step")
    assert rig.protection.holds(restored)


def test_an_update_between_due_iterations_waits_for_the_copy(make: Make) -> None:
    """The fence stays in every iteration: the copy of the due one may still read the shard."""
    platform = SlowPlatform()
    rig = make(platform)
    rig.protection.enter(EPOCH, 2)
    rig.protection.announce(generation(2))
    rig.protection.complete(b"2")
    rig.protection.announce(generation(3))
    rig.protection.gate()  # not due: no commit to wait for
    passed = threading.Event()
    thread = threading.Thread(target=lambda: (rig.protection.fence(), passed.set()))
    thread.start()
    assert not passed.wait(0.1)
    platform.end()
    thread.join(SECONDS)
    assert passed.is_set()


# Boundaries (traps, A9).


def test_the_gate_waits_for_the_last_boundary_that_was_appended(make: Make) -> None:
    rig = make().start()
    rig.step(1)
    for boundary in ("evaluation", "save"):
        rig.protection.append(generation(1), boundary, boundary.encode())
    rig.step(2)
    assert [name for _, name, _ in rig.vault.appended] == ["extras@evaluation", "extras@save"]
    assert rig.vault.asked[-1] == (generation(1), "save")


def test_boundaries_of_a_restored_generation_follow_in_order(make: Make) -> None:
    rig = make(max_lag=1)
    rig.protection.enter(EPOCH)
    restored = Generation(1, 8)
    rig.protection.owe(restored, "evaluation")
    rig.protection.append(restored, "save", b"s")
    rig.step(9)
    rig.step(10)
    assert rig.vault.appended == [(restored, "extras@save", b"s")]
    assert rig.vault.asked == [(restored, "evaluation"), (restored, "save")]


def test_extras_are_appended_after_the_slot_was_handed_over(make: Make) -> None:
    platform = SlowPlatform()
    rig = make(platform).start()
    thread = threading.Thread(target=rig.protection.append, args=(generation(0), "evaluation", b""))
    thread.start()
    thread.join(0.1)
    assert rig.vault.appended == []
    platform.end()
    thread.join(SECONDS)
    assert len(rig.vault.filled) == len(rig.vault.appended) == 1


# Page-locked slots on a device.


def test_a_driver_that_does_not_lock_memory_costs_speed_only(make: Make) -> None:
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


def test_restored_state_comes_in_by_side_copies_that_a_close_ends(make: Make) -> None:
    begun = threading.Event()

    class Watched(SlowPlatform):
        """Says when all copies have been started."""

        def side_copy(self, dst: list[torch.Tensor], src: list[torch.Tensor]) -> CopyHandle:
            copy = super().side_copy(dst, src)
            if len(self.copies) == 2:
                begun.set()
            return copy

    rig = make(Watched())
    rig.protection.enter(EPOCH)
    parts = [Part(f"shard{i}", [tensor], (0,)) for i, tensor in enumerate(rig.tensors)]
    held = [(part, memoryview(bytes(part.nbytes))) for part in parts]
    closer = rig.close_when(begun)
    with pytest.raises(EpochClosed, match="restored state"):
        rig.protection.load(held)
    closer.join(SECONDS)
    finishing = make()
    finishing.protection.enter(EPOCH)
    finishing.protection.load(held)
    assert not any(tensor.any() for tensor in rig.tensors)


class Recorder(UpdateCapture):
    """Notes in which order an iteration asks for what."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def capture(self, index: int, writer: Any) -> None:
        self.calls.append(f"capture {index}")

    def order_copies(self, await_it: Any) -> None:
        self.calls.append("order")

    def finish(self, *_: Any) -> tuple[dict[str, int], list[CopyHandle]]:
        self.calls.append("finish")
        return {}, []


def test_copies_of_gradients_are_ordered_before_the_next_iteration_overwrites_them(
    make: Make,
) -> None:
    """In each iteration: the order is all that keeps them as they were."""
    updates = Recorder()
    rig = make(updates=updates).start()
    updates.calls.clear()
    for iteration in (1, 2):
        rig.step(iteration)
    assert updates.calls == ["order", "capture 0", "capture 1", "finish"] * 2


@pytest.mark.parametrize("running", [0, 1])
def test_a_copy_that_still_reads_the_state_is_not_forgotten_for_one_that_has_ended(
    make: Make, running: int
) -> None:
    """Whatever their order: the state would be restored under it."""
    platform = SlowPlatform()
    rig = make(platform)
    rig.protection.enter(EPOCH)
    rig.protection.announce(generation(1), first=True)
    for index in range(2):
        rig.protection.using(index)
        rig.protection.updated(index)
    platform.copies[1 - running].ended.set()
    rig.close()
    assert not rig.protection.quiesce(0.05)
