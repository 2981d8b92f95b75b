"""Exceptions in a session, and the frames of an interrupted step."""

import argparse
import dataclasses
import gc
import time
import weakref
from unittest.mock import Mock

import pytest

from deadpool_megatron import arguments
from deadpool_megatron.comms import CommunicatorFault, EpochClosed
from deadpool_megatron.member.session import drain_seconds, forget_frames
from deadpool_megatron.vault.errors import VaultError
from fake_nccl import fake as fake_nccl
from tests.member.session_rig import QUICK, drained

# Exceptions that are no EpochClosed (rule 11).


def test_any_exception_after_a_close_counts_as_the_interrupt(rig, capfd):
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


def test_an_exception_without_a_close_is_the_programs_own(rig):
    rig.entry.loop.acts[1] = Mock(side_effect=ZeroDivisionError("a bug in the program"))
    rig.record(1)
    message = rig.expect("raised")
    assert (message["epoch"], message["text"]) == (1, "ZeroDivisionError: a bug in the program")
    assert rig.thread.is_alive(), "a better cause has some time to come"
    ended = rig.result()
    assert isinstance(ended, ZeroDivisionError)
    assert ended.__traceback__ is not None
    assert rig.messages("drained") == []
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
def test_an_exception_is_the_close_that_follows_its_report(rig, error, kind, group):
    """Of communication, as a library wraps it, or of the vault it is no fault of the process.
    However late the death of the peer is known, this process stays, and plays its role to the end
    in epoch 2."""
    rig.entry.loop.acts[1] = Mock(side_effect=error)
    rig.record(1)
    message = rig.expect(kind)
    assert message["epoch"] == 1
    assert group is None or message["group"] == group
    rig.drain(1)
    rig.entry.loop.acts.clear()
    rig.record(2)
    rig.ends_well()
    assert len(rig.messages("raised")) == (kind == "raised")


def test_an_interrupt_without_a_close_is_reported_and_waited_out(rig):
    rig.entry.loop.acts[1] = Mock(side_effect=EpochClosed(1, "allreduce"))
    rig.record(1)
    assert rig.expect("fault")["text"] == "interrupted without a close"
    time.sleep(QUICK.close_seconds)
    assert rig.thread.is_alive()
    assert "quiesce" not in rig.entry.calls, "it has not left before the close"
    rig.drain(1)
    assert rig.end() is None


# Frames of an interrupted step.


class Activation:
    """Stands for a tensor of the dead step."""


def test_frames_of_the_interrupted_step_are_forgotten():
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


def test_a_survivor_is_not_given_up_while_its_communicators_are_aborted():
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
