"""What a run has computed so far: each step once, whoever repeats it, and the final report.

A replayed step must give the numbers of the first time, bit for bit; anything else is a divergence.
Where arithmetic is deterministic that is the worst that can happen, and decides the exit status.
Pure bookkeeping, no input or output.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deadpool_megatron.cluster.failures import nonfinite_loss
from deadpool_megatron.events import Event, Kind
from deadpool_megatron.settings import Settings

EXIT_DIVERGENCE = 3


def divergence_is_fatal(settings: Settings, has_gpu: bool) -> bool:
    """Whether other numbers in a replayed step end the run; ``has_gpu``: this host has one."""
    if settings.divergence != "auto":
        return settings.divergence == "stop"
    return settings.communicator != "nccl" and not (settings.communicator == "auto" and has_gpu)


class Results:
    """Fed with every event in order, from the network or (after a restart) from the event file."""

    def __init__(self, fatal_divergence: bool = True) -> None:
        self._fatal_divergence = fatal_divergence
        self._steps: dict[int, dict[str, Any]] = {}
        self._evaluations: dict[int, dict[str, Any]] = {}
        self._hashes: dict[int, dict[int, str]] = {}
        self._roles: dict[int, dict[str, Any]] = {}
        self._recoveries: list[dict[str, Any]] = []
        self._durable: list[dict[str, Any]] = []
        self._opened: set[int] = set()
        self._plan: object = None
        self._lost: dict[int, str] = {}
        self.diverged = False

    @property
    def last_iteration(self) -> int:
        """Newest iteration whose numbers have been accepted; 0 before the first."""
        return max(self._steps, default=0)

    @property
    def lost_nodes(self) -> Mapping[int, str]:
        """Nodes that were given up, with the cause. None of them comes back under its number."""
        return self._lost

    def add(self, event: Event) -> list[Event]:
        """The events to write to the file: the given one, none if it only repeats a known one, or
        a divergence when it contradicts it.
        """
        if event.kind is Kind.STEP:
            return self._once(self._steps, event)
        if event.kind is Kind.EVALUATION:
            return self._once(self._evaluations, event)
        if event.kind is Kind.STATE_HASH:
            return self._hash(event)
        if event.kind is Kind.EPOCH_OPENED:
            # A coordinator that took over cannot know whether the one before has written it.
            known = event.epoch in self._opened
            self._opened.add(event.epoch)
            return [] if known else [event]
        if event.kind is Kind.PROTECTION:
            # For the same reason.
            before, self._plan = self._plan, event.data.get("new")
            return [] if before == self._plan else [event]
        if event.kind is Kind.EPOCH_DECIDED and "forgotten_from" in event.data:
            self._forget(int(event.data["forgotten_from"]))
        elif event.kind is Kind.MEMBER_DONE and event.role is not None:
            self._roles[event.role] = dict(event.data)
        elif event.kind is Kind.RECOVERED:
            self._recoveries.append({"epoch": event.epoch, **event.data})
        elif event.kind is Kind.DURABLE:
            self._durable.append({"iteration": event.iteration, **event.data})
        elif event.kind is Kind.STALE_DIVERGENCE:
            self.diverged = True
        elif event.kind is Kind.NODE_LOST and event.node is not None:
            self._lost[event.node] = str(event.data["cause"])
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
            "steps": [{"iteration": k, **self._steps[k]} for k in sorted(self._steps)],
            "evaluations": [
                {"iteration": k, **self._evaluations[k]} for k in sorted(self._evaluations)
            ],
            "hashes": {
                str(k): {str(role): found[role] for role in sorted(found)}
                for k, found in sorted(self._hashes.items())
            },
            "recoveries": self._recoveries,
            "durable": self._durable,
        }

    def _forget(self, iteration: int) -> None:
        """A loss was not finite: this iteration and later ones are computed anew, as if first."""
        for known in (self._steps, self._evaluations, self._hashes):
            for k in [k for k in known if k >= iteration]:
                del known[k]

    def _once(self, known: dict[int, dict[str, Any]], event: Event) -> list[Event]:
        iteration = 0 if event.iteration is None else event.iteration
        first = known.get(iteration)
        # After a loss that was not finite the iteration may be thrown away; and what is done about
        # it a coordinator that died may not have done.
        if first is None or nonfinite_loss(first):
            known[iteration] = dict(event.data)
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
