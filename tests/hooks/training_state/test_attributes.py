"""State in plain attributes comes back with the rest."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from megatron.core import rerun_state_machine
from megatron.core.rerun_state_machine import RerunMode, RerunStateMachine

from deadpool_megatron.hooks.training_state import attributes, extras, hashing
from deadpool_megatron.state import extras as codec
from tests.hooks.training_state.plain_loop import captured, plain_loop


class Attention(torch.nn.Module):
    """What Megatron's attention keeps for the log of the next step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.current_max_attn_logits: torch.Tensor | None = None

    def see(self, *logits: float) -> None:
        found = self.weight * torch.tensor(logits)
        known = self.current_max_attn_logits
        self.current_max_attn_logits = found if known is None else torch.max(known, found)


def test_the_largest_logits_are_logged_with_what_an_evaluation_has_seen() -> None:
    made = plain_loop([attention := Attention()])
    before, digests = captured(made), hashing.state_digests(made)
    attention.see(3.0, 14.5)
    behind, seen = captured(made), hashing.state_digests(made)
    assert seen != digests, "a process without it goes on with other numbers"
    attention.see(20.0, 1.0)
    extras.restore(made, behind)
    assert hashing.state_digests(made) == seen
    assert attention.current_max_attn_logits is not None
    assert attention.current_max_attn_logits.tolist() == [3.0, 14.5]
    assert not attention.current_max_attn_logits.requires_grad
    extras.restore(made, before)
    assert attention.current_max_attn_logits is None


def test_what_a_pass_of_an_audit_has_seen_is_neither_logged_nor_clipped_by() -> None:
    """It computes what is another role's, and on another device perhaps."""
    made = plain_loop([attention := Attention()])
    for seen in (None, [3.0, 14.5]):
        if seen is not None:
            attention.see(*seen)
        kept = codec.decode(codec.encode(extras.capture_passing(made)))
        attention.see(20.0, 1.0)
        extras.restore_passing(made, kept)
        left = attention.current_max_attn_logits
        assert (None if left is None else left.tolist()) == seen


def test_spikes_are_judged_by_what_the_run_has_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not by a warm-up, or by an iteration that was interrupted."""
    machine = RerunStateMachine(mode=RerunMode.VALIDATE_RESULTS)
    monkeypatch.setattr(rerun_state_machine, "_GLOBAL_RERUN_STATE_MACHINE", machine)
    made = plain_loop([Attention()])

    def is_spike(loss: float) -> bool:
        seen = torch.tensor(loss)
        return bool(machine.is_unexpectedly_large(seen, threshold=10, context="loss"))

    for _ in range(100):
        assert not is_spike(2.5)
    machine.first_iteration_complete = True
    kept = captured(made)
    machine.large_value_counts.clear()
    machine.first_iteration_complete = False
    assert not is_spike(1e6), "a process that has just warmed up"
    extras.restore(made, kept)
    assert machine.first_iteration_complete
    assert is_spike(1e6)


def test_extras_that_know_nothing_of_it_can_be_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = SimpleNamespace(large_value_counts={"loss": 3}, max_values={"loss": 2.5})
    monkeypatch.setattr(rerun_state_machine, "_GLOBAL_RERUN_STATE_MACHINE", machine)
    attributes.restore(plain_loop([Attention()]), {})
    assert machine.max_values == {"loss": 2.5}
