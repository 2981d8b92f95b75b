"""The history of a run that a coordinator must know to take over: a part of each epoch record.

A successor reads only the newest record, whatever the age of the run. So the record holds the whole
history, and no part of it grows without a limit. Changes after the newest record are not lost:

- An agent repeats the last reports of its members: the newest iteration and its numbers. If the
  agent of the reporting role is lost together with the coordinator, log lines of that iteration are
  printed twice, and its divergence stays unnoticed; no state depends on either.
- A removed node has its own entry in the journal (kind ``gone``), since perhaps no record follows.
  So has a quarantined node (kind ``wrong``), which keeps its roles until the next record.
- Damaged copies and slow nodes are detected again, as are crashes that repeat.
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
# Each kept lineage has at least one iteration of its own, so the newest of them cover at least this
# many iterations.
_MAX_LINEAGES = 1000
_MAX_NONFINITE = 1000
_MAX_CAUSE = 200
_MAX_CAUSES = 100
# Fields that the journal stores under older names.
_KEYS = {
    "removed": "gone",
    "quarantined": "wrong",
    "quarantined_hosts": "wrong_hosts",
    "invalidated": "struck",
    "reported_plan": "protection_told",
}


@dataclass(frozen=True)
class History:
    """Facts that a successor cannot find out again.

    ``kept``: kept lineages, this epoch included (see layout.planner.keep_lineages). ``removed``:
    removed nodes, with the cause. ``quarantined``: nodes that computed or held wrong numbers, or
    have a broken device; ``quarantined_hosts``: hosts whose nodes are all quarantined.
    ``distrusted``: nodes that get a role only where a failure leaves no other node. ``nonfinite``:
    iterations that were thrown away because a number was not finite, with the last lineage in which
    they or later iterations were computed. ``invalidated``: paths of checkpoints that could not be
    loaded.

    ``failures``: failures since the newest iteration, which count towards a crash loop, each as
    ``kind``, ``cause``, ``evidence`` (where to look further), ``signature`` (equal for a repeated
    failure), ``exited`` (a process ended by itself), ``iteration`` (newest finished) and ``node``
    (or None). ``recoveries`` and ``steps_recomputed``: counts that include the recovery which this
    epoch ends. ``reported_plan``: the plan that was reported before this epoch, None before the
    first. ``start``: the newest epoch whose processes had all ended when the run was started again.
    ``sizes``, ``changes``: the numbers of model replicas of an elastic run, and their changes.
    """

    kept: Mapping[int, int] = field(default_factory=dict)
    removed: Mapping[int, str] = field(default_factory=dict)
    quarantined: frozenset[int] = frozenset()
    quarantined_hosts: frozenset[str] = frozenset()
    distrusted: frozenset[int] = frozenset()
    nonfinite: Mapping[int, int] = field(default_factory=dict)
    invalidated: frozenset[str] = frozenset()
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
        older = sorted(self.removed)
        newest = [older.pop() for _ in older[-_MAX_CAUSES:]]
        written = {_KEYS.get(name, name): value for name, value in write(self).items()}
        if self.sizes is None:
            del written["sizes"], written["changes"]
        return {
            **written,
            "kept": [[*pair] for pair in sorted(self.kept.items())[-_MAX_LINEAGES:]],
            "gone": {str(node): self.removed[node][:_MAX_CAUSE] for node in newest},
            # The number of an old node is enough to refuse the node. Node numbers are consecutive,
            # so a few ranges between live nodes contain all removed nodes.
            "gone_before": _ranges(older),
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
        values = {**values, **pairs, "gone": {**before, **values["gone"]}}
        return read(History, values | {n: values[k] for n, k in _KEYS.items() if k in values})


def _ranges(numbers: Iterable[int]) -> list[list[int]]:
    """Return the first and last of each range of consecutive numbers; ``numbers`` ascend."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return found
