"""Results of a run: each step once, whoever repeats it, and the final report.

A replayed step must give the numbers of the first time, bit for bit; anything else is a divergence.
Where arithmetic is deterministic that is the worst that can happen, and decides the exit status.
The numbers of the newest iterations are compared: those that this coordinator has heard, or that
agents repeated to it when it took over. Replays do not go back further, but for a return to an old
checkpoint. Pure bookkeeping, no input or output.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deadpool_megatron.cluster.failures import EXIT_DIVERGENCE, not_finite
from deadpool_megatron.events import Event, Kind
from deadpool_megatron.settings import Settings

# So many iterations with numbers of each kind are compared; hashes are one for each role.
COMPARED_STEPS = 1024
COMPARED_HASHES = 64


def divergence_is_fatal(settings: Settings) -> bool:
    """Return whether other numbers in a replayed step end the run."""
    if settings.divergence != "auto":
        return settings.divergence == "stop"
    return settings.communicator != "nccl"


class Results:
    """Fed with every event in order. ``newest``: the newest iteration that is known already."""

    def __init__(self, fatal_divergence: bool = True, newest: int = 0) -> None:
        self._fatal_divergence = fatal_divergence
        self._steps: dict[int, dict[str, Any]] = {}
        self._evaluations: dict[int, dict[str, Any]] = {}
        self._hashes: dict[int, dict[int, str]] = {}
        self._roles: dict[int, dict[str, Any]] = {}
        self.last_iteration = newest  # the newest one whose numbers have been accepted
        self.diverged = False

    def add(self, event: Event) -> list[Event]:
        """The events to write to the file: the given one, none if it only repeats a known one, or
        a divergence when it contradicts it.
        """
        if event.kind is Kind.STEP:
            self.last_iteration = max(self.last_iteration, event.iteration or 0)
            return self._once(self._steps, event)
        if event.kind is Kind.EVALUATION:
            return self._once(self._evaluations, event)
        if event.kind is Kind.STATE_HASH:
            return self._hash(event)
        if event.kind is Kind.EPOCH_DECIDED and "forgotten_from" in event.data:
            self._forget(int(event.data["forgotten_from"]))
        elif event.kind is Kind.MEMBER_DONE and event.role is not None:
            self._roles[event.role] = dict(event.data)
        elif event.kind is Kind.STALE_DIVERGENCE:
            self.diverged = True
        return [event]

    def final(self, head: Mapping[str, Any], reason: str, exit_status: int) -> dict[str, Any]:
        """The object of ``final.json``; a divergence outranks success."""
        if self.diverged and self._fatal_divergence and exit_status == 0:
            exit_status = EXIT_DIVERGENCE
            reason = "a replayed iteration gave other numbers than the first time"
        return {
            "exit_status": exit_status,
            "reason": reason,
            **head,
            "iterations": self.last_iteration,
            "roles": {str(role): values for role, values in sorted(self._roles.items())},
        }

    def _forget(self, iteration: int) -> None:
        """A number was not finite: this iteration and later ones are computed again, as if
        first."""
        self.last_iteration = min(self.last_iteration, iteration - 1)
        for known in (self._steps, self._evaluations, self._hashes):
            for k in [k for k in known if k >= iteration]:
                del known[k]

    def _once(self, known: dict[int, dict[str, Any]], event: Event) -> list[Event]:
        iteration = 0 if event.iteration is None else event.iteration
        first = known.get(iteration)
        # After a number that was not finite the iteration may be thrown away; and what is done
        # about it a coordinator that died may not have done.
        if first is None or not_finite(first):
            known[iteration] = dict(event.data)
            if len(known) > COMPARED_STEPS:
                del known[min(known)]
            return [event]
        if first == dict(event.data):
            return []
        return self._divergence(event, str(event.kind), first, dict(event.data))

    def _hash(self, event: Event) -> list[Event]:
        if event.iteration is None or event.role is None:
            return [event]
        found = self._hashes.setdefault(event.iteration, {})
        sha256 = str(event.data["sha256"])
        first = found.setdefault(event.role, sha256)
        if len(self._hashes) > COMPARED_HASHES:
            del self._hashes[min(self._hashes)]
        if first == sha256:
            return [event]
        return self._divergence(event, "state hash", {"sha256": first}, {"sha256": sha256})

    def _divergence(
        self, event: Event, what: str, first: Mapping[str, Any], now: Mapping[str, Any]
    ) -> list[Event]:
        self.diverged = True
        return [
            Event(
                Kind.STALE_DIVERGENCE,
                epoch=event.epoch,
                node=event.node,
                role=event.role,
                iteration=event.iteration,
                data={"what": what, "first": dict(first), "now": dict(now)},
            )
        ]
