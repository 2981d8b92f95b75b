"""Protection when its epoch is closed at each wait, and when a helper thread fails."""

import threading
import time
from collections.abc import Callable

import pytest

from deadpool_megatron.comms import EpochClosed
from deadpool_megatron.layout.records import Generation
from deadpool_megatron.member.protection import ProtectionError
from deadpool_megatron.vault.errors import Frozen, VaultError
from tests.common.wait import wait_for
from tests.member import protection_rig
from tests.member.protection_rig import EPOCH, SECONDS, Rig, SlowPlatform, generation

make = protection_rig.make


# Interrupts, at each wait (rule 11).


def test_interrupt_while_the_vault_makes_the_slots(make):
    rig = make()
    rig.close()
    with pytest.raises(EpochClosed, match="slots of the role"):
        rig.protection.enter(EPOCH)


@pytest.mark.parametrize("wait", ["gate", "await_committed"])  # the latter: at the end of the run
def test_interrupt_while_waiting_for_a_commit(make, wait):
    rig = make().start()
    rig.vault.holds_back = True
    thread = rig.close_when(rig.vault.waiting)
    with pytest.raises(EpochClosed, match="commit of iteration 0"):
        getattr(rig.protection, wait)()
    thread.join(SECONDS)


def test_a_commit_that_comes_with_the_close_does_not_open_the_gate(make):
    rig = make().start()
    rig.closed = EPOCH
    with pytest.raises(EpochClosed):
        rig.protection.gate()


def test_interrupt_before_an_inner_update(make):
    rig = make().start()
    rig.protection.gate()
    rig.close()
    with pytest.raises(EpochClosed, match="update of the optimizer"):
        rig.protection.fence()


def test_interrupt_while_a_copy_still_reads(make):
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


@pytest.mark.parametrize("write", ["begin", "append"])
def test_the_vault_freezes_before_the_member_hears_of_the_close(make, write):
    rig = make().start()
    rig.protection.gate()
    rig.vault.frozen = True
    rig.vault.waiting.clear()
    thread = rig.close_when(rig.vault.waiting)
    protection = rig.protection
    writes = {
        "begin": lambda: protection.after_update(0),
        "append": lambda: protection.append(generation(0), "evaluation", b""),
    }
    with pytest.raises(EpochClosed):
        writes[write]()
    thread.join(SECONDS)
    assert rig.vault.appended == []


def steps_until_thawed(rig: Rig, wait: Callable[[], object]) -> None:
    """Take a step into frozen slots, which thaw once ``wait`` has seen what it waits for."""

    def thaw() -> None:
        assert wait()
        rig.vault.frozen = False

    thread = threading.Thread(target=thaw)
    thread.start()
    rig.step(1)
    thread.join(SECONDS)
    assert rig.settled() == [generation(0), generation(1)]


def test_a_vault_that_was_restarted_freezes_for_a_moment_only(make):
    """It is told of the last closed epoch before it is told of the open one."""
    rig = make().start()
    rig.protection.gate()
    rig.vault.frozen = True
    rig.vault.waiting.clear()

    steps_until_thawed(rig, lambda: rig.vault.waiting.wait(SECONDS))


def test_a_vault_that_freezes_for_longer_than_a_close_is_waited_for(make):
    """Told of in time: the role does not wait by its own fault, so that this is no hang of it."""
    rig = make(close_seconds=0.05, gate_report_seconds=0.2).start()
    rig.protection.gate()
    rig.waits.clear()
    rig.vault.frozen = True

    steps_until_thawed(rig, lambda: wait_for("a report of the wait", lambda: rig.waits, SECONDS))
    assert (generation(1), False) in rig.waits
    assert rig.waits[-1] == (generation(1), True)
    assert rig.protection.stall_seconds > 0.2


def test_a_vault_that_stays_frozen_in_an_open_epoch_ends_the_epoch(make):
    """And not the process, which has no part in it."""
    rig = make(close_seconds=0.05, operation_timeout_seconds=0.2).start()
    rig.protection.gate()
    rig.vault.frozen = True
    with pytest.raises(VaultError, match=r"frozen for 0\.2 s, though epoch 3 is open") as caught:
        rig.protection.after_update(0)
    assert not isinstance(caught.value, Frozen)


@pytest.mark.parametrize("when", ["before the copy ends", "before extras are complete"])
def test_nothing_is_handed_over_after_a_close(make, when):
    platform = SlowPlatform()
    rig = make(platform).start()
    platform.end()
    rig.protection.gate()
    rig.protection.announce(generation(1))
    rig.protection.after_update(0)
    if when == "before extras are complete":
        rig.close()
    rig.protection.complete(b"")
    rig.close()
    platform.end()
    assert rig.settled() == [generation(0)]
    assert rig.vault.writers[-1].abandoned
    with pytest.raises(EpochClosed):
        rig.protection.append(generation(1), "evaluation", b"")


# After an interrupt.


def test_quiesce_gives_back_a_slot_that_was_begun(make):
    rig = make().start()
    rig.protection.gate()
    rig.protection.announce(generation(1))
    rig.protection.after_update(0)
    rig.close()
    assert rig.settled() == [generation(0)]
    assert rig.vault.writers[-1].abandoned
    # The next epoch begins with nothing under way, and asks for nothing of the old one.
    rig.leave()
    rig.protection.enter(EPOCH + 1)
    rig.protection.begin_from(generation(0), "step")
    rig.protection.announce(Generation(EPOCH + 1, 1))
    rig.protection.gate()
    rig.protection.complete(b"")
    assert rig.settled()[-1] == Generation(EPOCH + 1, 1)


def test_a_copy_that_failed_cannot_be_left_cleanly(make):
    platform = SlowPlatform()
    rig = make(platform)
    rig.protection.enter(EPOCH)
    rig.protection.announce(generation(1))
    rig.protection.after_update(0)
    platform.copies[0].ended.set()
    platform.copies[0].error = True
    assert not rig.protection.quiesce(0.1)


def test_quiesce_has_one_deadline_for_all_copies(make):
    rig = make(SlowPlatform())
    rig.protection.enter(EPOCH)
    rig.protection.announce(generation(1))
    rig.protection.after_update(0)
    rig.protection.after_update(1)
    started = time.monotonic()
    assert not rig.protection.quiesce(0.2)
    assert time.monotonic() - started < 0.35


# Failures of the helper thread.


def test_a_slot_that_could_not_be_handed_over_shows_at_the_next_gate(make):
    rig = make()
    rig.vault.refuses_to_fill = True
    rig.start()
    with pytest.raises(ProtectionError, match="was not handed over: no vault"):
        rig.protection.gate()
    rig.vault.refuses_to_fill = False
    rig.close()
    with pytest.raises(EpochClosed):
        rig.protection.gate()
    rig.leave()
    rig.protection.enter(EPOCH + 1)
    rig.protection.gate()


def test_helper_threads_end_with_their_role(make):
    for _ in range(5):
        rig = make().start()
        rig.step(1)
        rig.protection.close()
    names = [thread.name for thread in threading.enumerate()]
    assert "deadpool-sealer" not in names


class Entering(SlowPlatform):
    """Notes the threads that have entered."""

    def __init__(self) -> None:
        super().__init__()
        self.entered: list[str] = []

    def thread_entry(self) -> Callable[[], None]:
        return lambda: self.entered.append(threading.current_thread().name)


def test_the_thread_that_waits_for_copies_has_the_device_of_its_member(make):
    """It asks for events of CUDA: on the first device of the node that would make a context."""
    platform = Entering()
    rig = make(platform).start()
    platform.end()
    assert rig.settled() == [generation(0)]
    assert platform.entered == ["deadpool-sealer"]
