"""Progress that members and vaults report: each step once, despite repeats, and each role's end.

A replayed step must give the numbers of the first time, bit for bit; any difference is a
divergence. Where arithmetic is deterministic, that is the worst possible result and decides the
exit status. Only the numbers of the newest iterations are compared, as far as this coordinator has
received them; agents repeat the last numbers to a coordinator that takes over. Replays do not go
back further, except after a return to an old checkpoint. Pure bookkeeping, no input or output.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deadpool_megatron.cluster.link import protocol
from deadpool_megatron.cluster.machine import inputs
from deadpool_megatron.events import Event, Kind, not_finite
from deadpool_megatron.failures import ExitStatus
from deadpool_megatron.settings import Settings

# How many iterations are compared for each kind; fewer for hashes, as each role has its own.
COMPARED = {Kind.STEP: 1024, Kind.EVALUATION: 1024, Kind.STATE_HASH: 64}


def divergence_is_fatal(settings: Settings) -> bool:
    """Return whether different numbers in a replayed step end the run."""
    if settings.divergence != "auto":
        return settings.divergence == "stop"
    return settings.communicator != "nccl"


class ReportedProgress:
    """The reported numbers, taken in order. ``newest``: the newest iteration known at the start."""

    def __init__(self, fatal_divergence: bool = True, newest: int = 0) -> None:
        self._fatal_divergence = fatal_divergence
        self._numbers: dict[Kind, dict[int, dict[int | None, dict[str, Any]]]] = {
            kind: {} for kind in COMPARED
        }
        self._roles: dict[int, dict[str, Any]] = {}
        self.last_iteration = newest  # the newest iteration whose numbers have been accepted
        self.diverged = False

    def take(self, report: Event) -> tuple[Event | None, inputs.Input | None]:
        """Return the event to write, and the input for the machine. If the numbers are known, the
        event is None, but a hash is written again; if they contradict known numbers, the event
        reports a divergence.
        """
        if report.kind is Kind.STEP:
            self.last_iteration = max(self.last_iteration, report.iteration or 0)
        values = dict(report.data)
        first = self._first(report, values) if report.kind in self._numbers else None
        if first is None:
            return report, protocol.from_progress(report)
        if first == values:
            return report if report.kind is Kind.STATE_HASH else None, None
        self.diverged = True
        data = {"what": str(report.kind).replace("-", " "), "first": first, "now": values}
        where = (report.epoch, report.node, report.role, report.iteration)
        event = Event(Kind.STALE_DIVERGENCE, *where, data=data)
        if not self._fatal_divergence:
            return event, None
        text = (
            f"role {report.role}, iteration {report.iteration}: {data['what']} was {first},"
            f" is now {values}"
        )
        return event, inputs.Diverged(text)

    def done(self, role: int, values: Mapping[str, Any]) -> None:
        """Note the end of a role."""
        self._roles[role] = dict(values)

    def forget(self, iteration: int) -> None:
        """Forget numbers from this iteration on, and the ends of roles: after a non-finite number,
        or at another number of roles, these iterations are computed again."""
        self._roles.clear()
        self.last_iteration = min(self.last_iteration, iteration - 1)
        for by_iteration in self._numbers.values():
            for k in [k for k in by_iteration if k >= iteration]:
                del by_iteration[k]

    def final(self, head: Mapping[str, Any], reason: str, exit_status: int) -> dict[str, Any]:
        """Return the object of ``final.json``; a divergence outranks success."""
        if self.diverged and self._fatal_divergence and exit_status == 0:
            exit_status = ExitStatus.DIVERGENCE
            reason = "a replayed iteration gave other numbers than the first time"
        return {
            "exit_status": exit_status,
            "reason": reason,
            **head,
            "iterations": self.last_iteration,
            "roles": {str(role): values for role, values in sorted(self._roles.items())},
        }

    def _first(self, report: Event, values: dict[str, Any]) -> dict[str, Any] | None:
        """Return the numbers in the first report of this iteration. If this is the first, keep its
        numbers and return None."""
        by_iteration, role = self._numbers[report.kind], None
        if report.kind is Kind.STATE_HASH:
            role, _ = report.role, values["sha256"]  # the KeyError refuses a malformed report
        by_role = by_iteration.setdefault(report.iteration or 0, {})
        first = by_role.get(role)
        # A non-finite number counts as new each time: the iteration may have been discarded, and a
        # coordinator that has failed since may not have acted on the number.
        if first is not None and not not_finite(first):
            return first
        by_role[role] = values
        if len(by_iteration) > COMPARED[report.kind]:
            del by_iteration[min(by_iteration)]
        return None
