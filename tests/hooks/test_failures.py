"""What a session makes of exceptions, and what an interrupted step leaves behind."""

import argparse
import dataclasses
import gc
import time
import weakref
from typing import Any
from unittest.mock import Mock

import pytest

from deadpool_megatron import arguments
from deadpool_megatron.cluster.failures import ExitStatus
from deadpool_megatron.cluster.link.member_link import StopOrder
from deadpool_megatron.comms import CommunicatorFault, EpochClosed
from deadpool_megatron.hooks.capture.optimizer import UnsupportedOptimizer
from deadpool_megatron.hooks.capture.protection import ExtrasOutgrown
from deadpool_megatron.hooks.dimensions import PeerMismatch
from deadpool_megatron.hooks.entry import RestoreFailed
from deadpool_megatron.hooks.interrupt_cleanup import forget_frames
from deadpool_megatron.hooks.session import drain_seconds
from deadpool_megatron.persist.state_template import TemplateError
from deadpool_megatron.state.extras import ExtrasError
from deadpool_megatron.vault.errors import VaultError
from fake_nccl import fake as fake_nccl
from tests.hooks.session_rig import QUICK, Rig, drained

# Exceptions that are no EpochClosed (rule 11).


def test_any_exception_after_a_close_counts_as_the_interrupt(
    rig: Rig, capfd: pytest.CaptureFixture[str]
) -> None:
    def step() -> None:
        try:
            rig.close(1)
            rig.communicators.collective()
        except EpochClosed:
            raise AssertionError("bucket group was not reset") from None

    rig.entry.loop.acts[1] = step
    rig.record(1)
    assert rig.expect("drained") == drained(1)
    assert rig.end() is None
    assert "epoch 1 ends here with AssertionError: bucket group" in capfd.readouterr().err


def test_an_exception_without_a_close_is_the_programs_own(rig: Rig) -> None:
    rig.entry.loop.acts[1] = Mock(side_effect=ZeroDivisionError("a bug in the program"))
    rig.record(1)
    said = rig.expect("raised")
    assert (said["epoch"], said["text"]) == (1, "ZeroDivisionError: a bug in the program")
    assert rig.thread.is_alive(), "a better cause has some time to come"
    ended = rig.result()
    assert isinstance(ended, ZeroDivisionError)
    assert ended.__traceback__ is not None
    assert rig.said("drained") == []
    assert rig.entry.calls[-1] == "close"


CAUSED = ValueError("the reader has no batch")
CAUSED.__cause__ = CommunicatorFault("WORLD", "allreduce", "closed")


@pytest.mark.parametrize(
    ("error", "kind", "group"),
    [
        (ValueError("half a message of a peer that died"), "raised", None),
        (
            RuntimeError("[/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]"),
            "fault",
            None,
        ),
        (CAUSED, "fault", None),
        (VaultError("the choice of a slot: frozen"), "fault", "vault"),
    ],
    ids=["raised", "gloo", "cause", "vault"],
)
def test_an_exception_is_the_close_that_follows_its_report(
    rig: Rig, error: Exception, kind: str, group: str | None
) -> None:
    """Of communication, as a library wraps it, or of the vault it is no fault of the process.
    However late the death of the peer is known, this process stays, and plays its role to the end
    in epoch 2."""
    rig.entry.loop.acts[1] = Mock(side_effect=error)
    rig.record(1)
    said = rig.expect(kind)
    assert said["epoch"] == 1
    assert group is None or said["group"] == group
    rig.drain(1)
    rig.entry.loop.acts.clear()
    rig.record(2)
    rig.ends_well()
    assert len(rig.said("raised")) == (kind == "raised")


def test_extras_without_room_end_the_process_with_their_status(
    rig: Rig, capfd: pytest.CaptureFixture[str]
) -> None:
    """And with one line, the last one, which the coordinator repeats."""

    rig.entry.loop.acts[1] = Mock(side_effect=ExtrasOutgrown("grown to 9 bytes, go on with more"))
    rig.record(1)
    ended = rig.result()
    assert isinstance(ended, SystemExit)
    assert ended.code == ExitStatus.EXTRAS_OUTGROWN
    assert capfd.readouterr().err.endswith("grown to 9 bytes, go on with more\n")


@pytest.mark.parametrize("stage", ["adopt", "rebuild", "step"])
@pytest.mark.parametrize(
    "error",
    [
        TemplateError("the program does not say what its checkpoints hold"),
        UnsupportedOptimizer("SGD keeps odd, a set"),
        ExtrasError("extra_state cannot be encoded: a set"),
    ],
    ids=["skeleton", "optimizer", "extras"],
)
def test_a_program_that_cannot_be_protected_ends_with_one_line(
    rig: Rig, stage: str, error: Exception, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whatever program it is: status 2, as for any bad input, and no traceback."""

    def refuse() -> None:
        raise error

    if stage == "step":
        rig.entry.loop.acts[1] = refuse
    else:
        rig.entry.acts[stage] = refuse
    capfd.readouterr()
    rig.record(1)
    ended = rig.result()
    assert isinstance(ended, SystemExit)
    assert ended.code == 2
    assert capfd.readouterr().err.splitlines() == [f"deadpool: {error}"]
    assert rig.entry.calls[-1] == "close"


def test_an_exception_while_building_ends_the_process_at_once(rig: Rig) -> None:
    """No peer has anything to do with it."""

    rig.entry.acts["adopt"] = Mock(side_effect=ValueError("no such data"))
    started = time.monotonic()
    rig.record(1)
    assert isinstance(rig.result(), ValueError)
    assert time.monotonic() - started < QUICK.close_seconds


@pytest.mark.parametrize(
    ("stage", "error", "kind", "wanted"),
    [
        ("restore", RestoreFailed("shard1", "no"), "restore-failed", {"part": "shard1"}),
        ("verify", PeerMismatch("parameters differ"), "restore-failed", {"part": ""}),
        ("restore", VaultError("no room"), "fault", {"group": "vault", "operation": "restore"}),
        ("rebuild", CommunicatorFault("WORLD", "attach", "late"), "fault", {"group": "WORLD"}),
    ],
    ids=["part-missing", "peers-differ", "vault", "communication"],
)
def test_failures_that_lead_to_a_new_decision(
    rig: Rig, stage: str, error: Exception, kind: str, wanted: dict[str, Any]
) -> None:
    """Only what is about the state may cast doubt on the generation."""

    rig.entry.acts[stage] = Mock(side_effect=error)
    rig.record(1)
    said = rig.expect(kind)
    assert said["epoch"] == 1
    assert {name: said[name] for name in wanted} == wanted
    rig.drain(1)
    del rig.entry.acts[stage]
    rig.record(2)
    rig.ends_well()
    assert len(rig.said("fault") + rig.said("restore-failed")) == 1


def test_an_interrupt_without_a_close_is_reported_and_waited_out(rig: Rig) -> None:
    rig.entry.loop.acts[1] = Mock(side_effect=EpochClosed(1, "allreduce"))
    rig.record(1)
    assert rig.expect("fault")["text"] == "interrupted without a close"
    time.sleep(QUICK.close_seconds)
    assert rig.thread.is_alive()
    assert "quiesce" not in rig.entry.calls, "it has not left before the close"
    rig.drain(1)
    assert rig.end() is None


def test_the_end_of_the_run_ends_any_wait(rig: Rig) -> None:
    rig.entry.acts["restore"] = Mock(side_effect=VaultError("no"))
    rig.record(1)
    rig.expect("fault")
    assert rig.end() is None
    assert rig.said("drained") == []


# What an interrupted step leaves behind.


class Activation:
    """Stands for a tensor of the dead step."""


def test_frames_of_the_interrupted_step_are_forgotten() -> None:
    alive: list[weakref.ref[Activation]] = []

    def keep() -> Activation:
        made = Activation()
        alive.append(weakref.ref(made))
        return made

    def inner() -> None:
        held = keep()
        raise RuntimeError(f"connection lost while {held} was on its way")

    def middle() -> None:
        held = keep()
        try:
            inner()
        except RuntimeError as error:
            raise EpochClosed(1, f"allreduce of {held}") from error

    def cleanup() -> None:
        held = keep()
        try:
            middle()
        finally:
            assert held is not None

    gc.disable()
    try:
        try:
            cleanup()
        except EpochClosed as error:
            closed = error
        assert [ref() is not None for ref in alive] == [True] * 3
        forget_frames(closed)
        assert [ref() for ref in alive] == [None] * 3
    finally:
        gc.enable()


def test_a_survivor_is_not_given_up_while_its_communicators_are_aborted() -> None:
    """A thousand operations of NCCL are pending in a deep queue of launches."""
    parser = argparse.ArgumentParser()
    arguments.add_arguments(parser)
    settings = arguments.settings_from(parser.parse_args([]), communicator="nccl")
    aborts_seconds = fake_nccl.ABORT_SECONDS + 1000 * fake_nccl.ABORT_SECONDS_PER_OPERATION
    limit_seconds = drain_seconds("nccl", settings)
    assert limit_seconds > aborts_seconds > settings.drain_seconds
    assert 2 * limit_seconds < settings.close_seconds, "or its agent kills it first"
    longer = dataclasses.replace(settings, close_seconds=1.5 * settings.close_seconds)
    assert drain_seconds("nccl", longer) == 1.5 * limit_seconds, "one number for a larger job"


def test_stop_order_is_no_failure(rig: Rig) -> None:
    rig.entry.loop.acts[1] = Mock(side_effect=StopOrder("over"))
    rig.record(1)
    assert rig.result() is None
