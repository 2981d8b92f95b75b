"""Protection against a vault in this process: what is copied when, and what each wait waits for."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

from deadpool_megatron.comms import EpochClosed
from deadpool_megatron.hooks.entry import EpochEntry
from deadpool_megatron.hooks.layouts import role_layout
from deadpool_megatron.hooks.protection import Protection, ProtectionError
from deadpool_megatron.layout.records import EpochRecord, Generation, Restore
from deadpool_megatron.platform.base import CopyFailedError, CopyHandle, Platform
from deadpool_megatron.platform.cpu import CpuPlatform
from deadpool_megatron.settings import Settings
from deadpool_megatron.state.packing import Part
from deadpool_megatron.vault.errors import Frozen
from deadpool_megatron.wire.readiness import readable

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

    def register(self, layout: Any, epoch: int) -> None:
        self.registered.append(epoch)

    def begin(self, generation: Generation, epoch: int) -> Writer:
        self._check()
        self.writers.append(Writer(self, generation))
        return self.writers[-1]

    def append(self, generation: Generation, part_name: str, payload: bytes) -> None:
        self._check()
        self.appended.append((generation, part_name, payload))

    def wait_committed(
        self, generation: Generation, boundary: str, *, interrupted: int, **options: Any
    ) -> str:
        self.asked.append((generation, boundary))
        self.waiting.set()
        while self.holds_back and not self.commit.is_set():
            if readable(interrupted, 0.005):
                return "interrupted"
            options["on_wait"](0.005)
        return "committed"

    def _check(self) -> None:
        self.waiting.set()
        if self.frozen:
            raise Frozen("the epoch has been closed")


class Copy(CopyHandle):
    """A copy that ends when it is told to."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.error = False

    def done(self) -> bool:
        if self.error:
            raise CopyFailedError("device in error")
        return self.ended.is_set()

    def wait(self, timeout_seconds: float) -> bool:
        self.ended.wait(timeout_seconds)
        return self.done()


class SlowPlatform(CpuPlatform):
    """Copies end when the test says so; host memory can be registered and is counted."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[Copy] = []
        self.pinned: list[int] = []

    def side_copy(self, dst: list[torch.Tensor], src: list[torch.Tensor]) -> CopyHandle:
        self.copies.append(Copy())
        return self.copies[-1]

    def register_host_memory(self, memory: torch.Tensor | memoryview) -> None:
        self.pinned.append(id(memory))

    def unregister_host_memory(self, memory: torch.Tensor | memoryview) -> None:
        self.pinned.remove(id(memory))


class Rig:
    """A protection with two parts, its vault, and the switch that closes the epoch."""

    def __init__(self, platform: Platform, **settings: Any) -> None:
        self.vault = Vault()
        self.closed = 0
        self.interrupt_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.waits: list[tuple[Generation, bool]] = []
        self.tensors = [torch.arange(100.0), torch.arange(7.0)]
        parts = [Part(f"shard{i}", [tensor], (0,)) for i, tensor in enumerate(self.tensors)]
        quick = {"close_seconds": 0.3, "drain_seconds": 0.1, **settings}
        self.settings = dataclasses.replace(Settings(), **quick)
        self.protection = Protection(
            vault=self.vault,  # type: ignore[arg-type]
            platform=platform,
            settings=self.settings,
            parts=parts,
            layout=role_layout(0, parts, 100, [0, 1], 2 + self.settings.max_lag, "pp0"),
            interrupt_fd=self.interrupt_fd,
            closed_epoch=lambda: self.closed,
            report_wait=lambda g, seconds, over: self.waits.append((g, over)),
        )

    def start(self) -> None:
        """Enter the epoch and seal generation 0, as a fresh start does."""
        self.protection.enter(EPOCH)
        self.protection.announce(generation(0))
        self.protection.complete(b"0")
        self.protection.owe(generation(0), "step")

    def step(self, iteration: int, *, skipped: bool = False) -> None:
        """One iteration as the loop and the optimizer hooks go through it."""
        protection = self.protection
        protection.announce(generation(iteration))
        protection.gate()
        if not skipped:
            for index, tensor in enumerate(self.tensors):
                protection.fence()
                tensor.add_(1)
                protection.updated(index)
        if protection.is_wanted:
            protection.complete(f"extras {iteration}".encode())

    def settled(self) -> list[Generation]:
        """What was handed to the vault so far, after everything under way has ended."""
        assert self.protection.quiesce(SECONDS)
        return [writer.generation for writer in self.vault.filled]

    def close(self) -> None:
        """What the watcher thread does when the epoch is closed."""
        self.closed = EPOCH
        os.eventfd_write(self.interrupt_fd, 1)

    def close_when(self, event: threading.Event) -> threading.Thread:
        """Close from another thread, once the main one waits."""

        def run() -> None:
            assert event.wait(SECONDS)
            self.close()

        thread = threading.Thread(target=run)
        thread.start()
        return thread


def generation(iteration: int) -> Generation:
    return Generation(EPOCH, iteration)


@pytest.fixture
def make() -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def build(platform: Platform | None = None, **settings: Any) -> Rig:
        rigs.append(Rig(platform or CpuPlatform(), **settings))
        return rigs[-1]

    yield build
    for rig in rigs:
        rig.protection.close()
        os.close(rig.interrupt_fd)


def test_a_checkpoint_becomes_a_generation_at_the_boundary_that_it_includes(
    make: Callable[..., Rig],
) -> None:
    """Or an evaluation that is in it would be done twice after the next failure."""

    class Entry(EpochEntry):
        """With everything around the protection taken away."""

        def __init__(self, rig: Rig) -> None:
            self.generation, self.boundary = generation(6), "save"
            self._protection = rig.protection
            self._dimensions = ()

        def capture_extras(self) -> bytes:
            return b"after the save"

    rig = make()
    rig.protection.enter(EPOCH)
    restore = Restore("durable", generation(6), "save", "somewhere")
    Entry(rig).verify(EpochRecord(EPOCH, {}, {}, restore, "127.0.0.1", 1), 0)
    rig.step(7)
    first = rig.vault.filled[0]
    assert {name for name in first.filled if "@" in name} == {"extras@save"}
    assert bytes(first.parts["extras@save"][:14]) == b"after the save"
    assert rig.vault.asked == [(generation(6), "save")]


# The gate (design, section 4).


@pytest.mark.parametrize(("lag", "wanted"), [(0, [0, 1, 2]), (1, [0, 0, 1]), (2, [0, 0, 0])])
def test_an_update_waits_for_the_commit_that_lies_the_lag_behind(
    make: Callable[..., Rig], lag: int, wanted: list[int]
) -> None:
    """The first update waits for generation 0 whatever the lag: it must exist twice by then."""
    rig = make(max_lag=lag)
    rig.start()
    for iteration in (1, 2, 3):
        rig.step(iteration)
    assert [asked[0].iteration for asked in rig.vault.asked] == wanted
    rig.protection.settle()
    assert rig.vault.asked[-1] == (generation(3), "step")


@pytest.mark.parametrize("lag", [0, 2])
def test_after_a_restore_the_first_update_waits_for_reprotection(
    make: Callable[..., Rig], lag: int
) -> None:
    rig = make(max_lag=lag)
    rig.protection.enter(EPOCH)
    restored = Generation(1, 41)
    rig.protection.owe(restored, "evaluation")
    rig.step(42)
    assert rig.vault.asked == [(restored, "evaluation")]


def test_the_gate_does_not_open_by_itself(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.start()
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


def test_warming_up_protects_nothing(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.protection.gate()
    rig.protection.fence()
    rig.protection.updated(0)
    assert rig.vault.asked == []
    assert rig.vault.writers == []


# What is copied.


def test_a_generation_holds_what_each_update_left(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.start()
    rig.step(1)
    wanted = [tensor.clone() for tensor in rig.tensors]
    assert rig.settled() == [generation(0), generation(1)]
    slot = rig.vault.filled[-1]
    for index, tensor in enumerate(wanted):
        found = torch.frombuffer(slot.part(f"shard{index}"), dtype=torch.float32)
        assert torch.equal(found[: tensor.numel()], tensor)
    assert set(slot.filled) == {"shard0", "shard1", "extras@step"}
    assert bytes(slot.part("extras@step")[: slot.filled["extras@step"]]) == b"extras 1"


def test_a_skipped_update_makes_a_generation_too(make: Callable[..., Rig]) -> None:
    """Traps, A5: no hook of an inner optimizer fires."""
    rig = make()
    rig.start()
    rig.step(1, skipped=True)
    assert rig.settled() == [generation(0), generation(1)]
    assert set(rig.vault.filled[-1].filled) == {"shard0", "shard1", "extras@step"}


def test_a_role_without_optimizer_state_seals_its_extras(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.tensors.clear()
    rig.protection._parts.clear()
    rig.start()
    rig.step(1)
    assert rig.settled() == [generation(0), generation(1)]
    assert set(rig.vault.filled[-1].filled) == {"extras@step"}


def test_one_generation_at_a_time_even_without_a_gate(make: Callable[..., Rig]) -> None:
    platform = SlowPlatform()
    rig = make(platform)
    rig.start()
    handed = threading.Thread(target=lambda: rig.protection.complete(b"again"))
    rig.protection.announce(generation(1))
    handed.start()
    handed.join(0.1)
    assert handed.is_alive(), "the first one is still being copied"
    while handed.is_alive():
        for copy in platform.copies:
            copy.ended.set()
        handed.join(0.01)
    for copy in platform.copies:
        copy.ended.set()
    assert rig.settled() == [generation(0), generation(1)]


def test_extras_that_outgrow_their_room_are_refused(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.start()
    room = rig.protection.layout.parts[-1].nbytes
    with pytest.raises(ProtectionError, match=f"grown to {room + 1} bytes, room for {room}"):
        rig.protection.complete(bytes(room + 1))
    with pytest.raises(ProtectionError, match="have grown"):
        rig.protection.append(generation(0), "save", bytes(room + 1))


# The cadence: only some generations are due.


def thin(make: Callable[..., Rig], every: int, **settings: Any) -> Rig:
    """An epoch of that cadence, from generation 0."""
    rig = make(**settings)
    rig.protection.enter(EPOCH, every)
    rig.protection.announce(generation(0), first=True)
    rig.protection.complete(b"0")
    rig.protection.owe(generation(0), "step")
    return rig


@pytest.mark.parametrize(("lag", "wanted"), [(0, [0, 0, 3, 6]), (1, [0, 0, 0, 3])])
def test_only_due_iterations_take_slots_and_wait_for_commits(
    make: Callable[..., Rig], lag: int, wanted: list[int]
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


def test_the_first_generation_of_a_line_is_due_whatever_its_number(
    make: Callable[..., Rig],
) -> None:
    rig = make()
    rig.protection.enter(EPOCH, 5)
    rig.protection.announce(generation(7), first=True)
    assert rig.protection.is_wanted
    rig.protection.announce(generation(8))
    assert not rig.protection.is_wanted


def test_segments_count_for_due_and_restored_generations_only(make: Callable[..., Rig]) -> None:
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


def test_an_update_between_due_iterations_waits_for_the_copy(make: Callable[..., Rig]) -> None:
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
    for copy in platform.copies:
        copy.ended.set()
    thread.join(SECONDS)
    assert passed.is_set()


# Boundaries (traps, A9).


def test_the_gate_waits_for_the_last_boundary_that_was_appended(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.start()
    rig.step(1)
    for boundary in ("evaluation", "save"):
        rig.protection.append(generation(1), boundary, boundary.encode())
    rig.step(2)
    assert [name for _, name, _ in rig.vault.appended] == ["extras@evaluation", "extras@save"]
    assert rig.vault.asked[-1] == (generation(1), "save")


def test_boundaries_of_a_restored_generation_follow_in_order(make: Callable[..., Rig]) -> None:
    rig = make(max_lag=1)
    rig.protection.enter(EPOCH)
    restored = Generation(1, 8)
    rig.protection.owe(restored, "evaluation")
    rig.protection.append(restored, "save", b"s")
    rig.step(9)
    rig.step(10)
    assert rig.vault.appended == [(restored, "extras@save", b"s")]
    assert rig.vault.asked == [(restored, "evaluation"), (restored, "save")]


def test_extras_are_appended_after_the_slot_was_handed_over(make: Callable[..., Rig]) -> None:
    platform = SlowPlatform()
    rig = make(platform)
    rig.start()
    thread = threading.Thread(target=rig.protection.append, args=(generation(0), "evaluation", b""))
    thread.start()
    thread.join(0.1)
    assert rig.vault.appended == []
    for copy in platform.copies:
        copy.ended.set()
    thread.join(SECONDS)
    assert len(rig.vault.filled) == len(rig.vault.appended) == 1


# Interrupts, at each wait (rule 11).


def test_interrupt_while_waiting_for_a_commit(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.start()
    rig.vault.holds_back = True
    thread = rig.close_when(rig.vault.waiting)
    with pytest.raises(EpochClosed, match="commit of iteration 0"):
        rig.protection.gate()
    thread.join(SECONDS)


def test_a_commit_that_comes_with_the_close_does_not_open_the_gate(
    make: Callable[..., Rig],
) -> None:
    rig = make()
    rig.start()
    rig.closed = EPOCH
    with pytest.raises(EpochClosed):
        rig.protection.gate()


def test_interrupt_at_the_end_of_the_run(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.start()
    rig.vault.holds_back = True
    thread = rig.close_when(rig.vault.waiting)
    with pytest.raises(EpochClosed):
        rig.protection.settle()
    thread.join(SECONDS)


def test_interrupt_before_an_inner_update(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.start()
    rig.protection.gate()
    rig.close()
    with pytest.raises(EpochClosed, match="update of the optimizer"):
        rig.protection.fence()


def test_interrupt_while_a_copy_still_reads(make: Callable[..., Rig]) -> None:
    platform = SlowPlatform()
    rig = make(platform)
    rig.start()
    thread = threading.Timer(0.05, rig.close)
    thread.start()
    with pytest.raises(EpochClosed, match="copy of a generation"):
        rig.protection.gate()
    thread.join(SECONDS)
    assert not rig.protection.quiesce(0.05), "the copies still read"
    for copy in platform.copies:
        copy.ended.set()
    assert rig.protection.quiesce(SECONDS)
    assert rig.vault.filled == []
    assert rig.vault.writers[-1].abandoned


@pytest.mark.parametrize("write", ["begin", "append"])
def test_the_vault_freezes_before_the_member_hears_of_the_close(
    make: Callable[..., Rig], write: str
) -> None:
    rig = make()
    rig.start()
    rig.protection.gate()
    rig.vault.frozen = True
    rig.vault.waiting.clear()
    thread = rig.close_when(rig.vault.waiting)
    protection = rig.protection
    writes = {
        "begin": lambda: protection.updated(0),
        "append": lambda: protection.append(generation(0), "evaluation", b""),
    }
    with pytest.raises(EpochClosed):
        writes[write]()
    thread.join(SECONDS)
    assert rig.vault.appended == []


def test_a_vault_that_was_restarted_freezes_for_a_moment_only(make: Callable[..., Rig]) -> None:
    """It is told of the last closed epoch before it is told of the open one."""
    rig = make()
    rig.start()
    rig.protection.gate()
    rig.vault.frozen = True
    rig.vault.waiting.clear()

    def thaw() -> None:
        assert rig.vault.waiting.wait(SECONDS)
        rig.vault.frozen = False

    thread = threading.Thread(target=thaw)
    thread.start()
    rig.step(1)
    thread.join(SECONDS)
    assert rig.settled() == [generation(0), generation(1)]


def test_a_vault_that_stays_frozen_in_an_open_epoch_is_named(make: Callable[..., Rig]) -> None:
    rig = make(close_seconds=0.2)
    rig.start()
    rig.protection.gate()
    rig.vault.frozen = True
    with pytest.raises(ProtectionError, match=r"frozen the slots of the open epoch 3 for 0\.2 s"):
        rig.protection.updated(0)


@pytest.mark.parametrize("when", ["before the copy ends", "before extras are complete"])
def test_nothing_is_handed_over_after_a_close(make: Callable[..., Rig], when: str) -> None:
    platform = SlowPlatform()
    rig = make(platform)
    rig.start()
    for copy in platform.copies:
        copy.ended.set()
    rig.protection.gate()
    rig.protection.announce(generation(1))
    rig.protection.updated(0)
    if when == "before extras are complete":
        rig.close()
    rig.protection.complete(b"")
    rig.close()
    for copy in platform.copies:
        copy.ended.set()
    assert rig.settled() == [generation(0)]
    assert rig.vault.writers[-1].abandoned
    with pytest.raises(EpochClosed):
        rig.protection.append(generation(1), "evaluation", b"")


# After an interrupt.


def test_quiesce_gives_back_a_slot_that_was_begun(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.start()
    rig.protection.gate()
    rig.protection.announce(generation(1))
    rig.protection.updated(0)
    rig.close()
    assert rig.settled() == [generation(0)]
    assert rig.vault.writers[-1].abandoned
    # The next epoch begins with nothing under way, and asks for nothing of the old one.
    rig.protection.enter(EPOCH + 1)
    rig.protection.owe(generation(0), "step")
    rig.protection.announce(Generation(EPOCH + 1, 1))
    rig.protection.gate()
    rig.protection.complete(b"")
    assert rig.settled()[-1] == Generation(EPOCH + 1, 1)


def test_a_copy_that_failed_cannot_be_left_cleanly(make: Callable[..., Rig]) -> None:
    platform = SlowPlatform()
    rig = make(platform)
    rig.protection.enter(EPOCH)
    rig.protection.announce(generation(1))
    rig.protection.updated(0)
    platform.copies[0].ended.set()
    platform.copies[0].error = True
    assert not rig.protection.quiesce(0.1)


def test_quiesce_has_one_deadline_for_all_copies(make: Callable[..., Rig]) -> None:
    rig = make(SlowPlatform())
    rig.protection.enter(EPOCH)
    rig.protection.announce(generation(1))
    rig.protection.updated(0)
    rig.protection.updated(1)
    started = time.monotonic()
    assert not rig.protection.quiesce(0.2)
    assert time.monotonic() - started < 0.35


# Failures of the helper thread.


def test_a_slot_that_could_not_be_handed_over_shows_at_the_next_gate(
    make: Callable[..., Rig],
) -> None:
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


def test_helper_threads_end_with_their_role(make: Callable[..., Rig]) -> None:
    for _ in range(5):
        rig = make()
        rig.start()
        rig.step(1)
        rig.protection.close()
    names = [thread.name for thread in threading.enumerate()]
    assert "deadpool-sealer" not in names


# Page-locked slots on a device.


def test_on_a_device_each_slot_is_page_locked_once(make: Callable[..., Rig]) -> None:
    platform = SlowPlatform()
    platform.is_cuda = True
    rig = make(platform)
    one, other = Writer(rig.vault, generation(0)), Writer(rig.vault, generation(1))
    for writer in (one, other, one, other):
        rig.protection._pinned.pin(writer)  # type: ignore[arg-type]
    assert len(platform.pinned) == 4, "two slots of two parts"
    rig.protection.close()
    assert platform.pinned == []


def test_layouts_of_equal_roles_are_interchangeable() -> None:
    def build(value: float, nbytes: int) -> Any:
        parts = [Part("shard0", [torch.full((5,), value)], (0,))]
        return role_layout(0, parts, nbytes, [1, 0], 2, "pp0")

    one, other = build(1.0, 500), build(2.0, 520)
    assert one == other, "extras have room to grow, in coarse steps"
    assert one.peers == (0, 1)
    assert one.shard_parts == ("shard0",)
