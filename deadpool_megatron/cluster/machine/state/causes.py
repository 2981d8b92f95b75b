"""Why an epoch ends, and how the run does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deadpool_megatron.cluster.failures import FailureKind


@dataclass(frozen=True)
class Failure:
    """Why an epoch ends. ``signature``: equal for the same failure again; () is not a failure.

    ``exited``: the process ended by itself, so trying again will most likely end the same.
    ``evidence``: more than ``cause`` for whoever has to find a bug, such as the name of a log.
    """

    cause: str
    kind: FailureKind
    signature: tuple[str, ...] = ()
    exited: bool = False
    node: int | None = None
    evidence: str = ""

    def with_evidence(self) -> str:
        """The cause, and where to look further."""
        return f"{self.cause} [{self.evidence}]" if self.evidence else self.cause

    @staticmethod
    def from_record(values: Mapping[str, Any]) -> Failure:
        """What :meth:`to_record` has kept."""
        kind, signature = FailureKind(values["kind"]), tuple(values["signature"])
        cause, evidence = str(values["cause"]), str(values["evidence"])
        return Failure(cause, kind, signature, bool(values["exited"]), values["node"], evidence)

    def to_record(self, iteration: int) -> dict[str, Any]:
        """What a record of the next epoch says of it; see :class:`History`."""
        return {
            "kind": str(self.kind),
            "cause": self.cause,
            "evidence": self.evidence,
            "signature": list(self.signature),
            "exited": self.exited,
            "iteration": iteration,
            "node": self.node,
        }


@dataclass(frozen=True)
class LastWords:
    """How the run ends once its state is saved. ``kind``: of the failure that ends it.
    ``exports``: a dump is made a checkpoint, too, as nobody waits for the end."""

    status: int
    reason: str
    kind: FailureKind | None = None
    exports: bool = False
