"""The history of a run that a coordinator must know to take over: a part of each epoch record.

A successor reads only the newest record, whatever the age of the run. So the record holds the whole
history, and no part of it grows without a limit. Changes between two records are left out, because
the reconnecting agents report them again, or because their loss does no harm:

- The newest reported iteration and its numbers: an agent repeats the last reports of its members.
  If the agent of the reporting role is lost together with the coordinator, log lines of that
  iteration are printed twice, and its divergence stays unnoticed; no state depends on either.
- A removed node has its own entry in the journal (kind ``gone``), since no record may follow. So
  has a quarantined node (kind ``wrong``), which keeps its roles until the next record.
- Damaged copies, slow nodes and crashes that do not repeat are all detected again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from deadpool_megatron.layout.schemes import ProtectionPlan
from deadpool_megatron.layout.sizes import SizeChanges, Sizes
from deadpool_megatron.wire.forms import read, write

# Last iteration of the lineage that is being computed now: unknown, so unlimited.
NO_LIMIT = sys.maxsize
# A lineage that is kept holds at least one iteration of its own, and no slot or chain of steps is
# older than this many iterations.
_MAX_LINEAGES = 1000
_MAX_NONFINITE = 1000
_MAX_CAUSE = 200
_MAX_CAUSES = 100


@dataclass(frozen=True)
class History:
    """Facts that a successor cannot find out again.

    ``kept``: lineages with this epoch (see layout.planner.keep_lineages). ``gone``: removed nodes,
    with the cause. ``wrong``: quarantined nodes, which computed or held wrong numbers, or have a
    broken device; ``wrong_hosts``: hosts whose nodes are all quarantined. ``distrusted``: nodes
    that get a role only where a failure leaves no other. ``nonfinite``: iterations that were thrown
    away, because a number was not finite, with the last lineage in which they or later iterations
    were computed. ``struck``: paths of checkpoints that could not be loaded.

    ``failures``: those since the newest iteration, which count for a crash loop, each as ``kind``,
    ``cause``, ``evidence`` (where to look further), ``signature`` (equal for a repeated failure),
    ``exited`` (a process ended by itself), ``iteration`` (newest finished) and ``node`` (or None).
    ``recoveries`` and ``steps_recomputed``: counts that include the recovery which this epoch ends.
    ``reported_plan``: the plan that was reported before this epoch, None before the first.
    ``start``: the newest epoch whose processes had all ended when the run was started again.
    ``sizes``, ``changes``: those of the number of model replicas, of an elastic run only.
    """

    kept: Mapping[int, int] = field(default_factory=dict)
    gone: Mapping[int, str] = field(default_factory=dict)
    wrong: frozenset[int] = frozenset()
    wrong_hosts: frozenset[str] = frozenset()
    distrusted: frozenset[int] = frozenset()
    nonfinite: Mapping[int, int] = field(default_factory=dict)
    struck: frozenset[str] = frozenset()
    failures: tuple[Mapping[str, Any], ...] = ()
    recoveries: int = 0
    steps_recomputed: int = 0
    reported_plan: ProtectionPlan | None = None
    start: int = 0
    sizes: Sizes | None = None
    changes: SizeChanges = field(default_factory=SizeChanges)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, with only the newest entries of fields that would grow without
        end."""
        known = sorted(self.gone)
        newest = [known.pop() for _ in known[-_MAX_CAUSES:]]
        written = write(self)
        written["protection_told"] = written.pop("reported_plan")
        if self.sizes is None:
            del written["sizes"], written["changes"]
        return {
            **written,
            "kept": [[*pair] for pair in sorted(self.kept.items())[-_MAX_LINEAGES:]],
            "gone": {str(node): self.gone[node][:_MAX_CAUSE] for node in newest},
            # The number of an old node is enough to refuse it. Numbers are consecutive, so a few
            # stretches between live nodes hold them all.
            "gone_before": _stretches(known),
            "nonfinite": [[*pair] for pair in sorted(self.nonfinite.items())[-_MAX_NONFINITE:]],
        }

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> History:
        """Invert :meth:`to_dict`."""
        before = {
            node: "it was given up before"
            for first, last in values.get("gone_before", ())
            for node in range(int(first), int(last) + 1)
        }
        pairs = {name: dict(values[name]) for name in ("kept", "nonfinite")}
        renamed = {"reported_plan": values.get("protection_told")}
        return read(History, {**values, **renamed, **pairs, "gone": {**before, **values["gone"]}})


def _stretches(numbers: Iterable[int]) -> list[list[int]]:
    """Return first and last of each stretch of ascending numbers without a gap."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return found
