"""Ways to protect state: the schemes, and the plan of an epoch, which names a scheme. Pure.

Schemes: ``buddy`` copies to other nodes (DeadPool, FFTrainer); ``parity`` keeps erasure-coded
blocks over a group of roles (REFT's AEC); ``local`` keeps the slots of each node only (REFT's SMP),
``local-twice`` a second copy of them in the memory of the same node (REFT's ARC).
"""

from __future__ import annotations

from dataclasses import dataclass

from deadpool_megatron.settings import SchemeKind, Settings
from deadpool_megatron.wire.forms import Coded, Listed

MAX_BLOCKS = 256  # roles plus parity blocks of a group (k + m); a byte has no more values


@dataclass(frozen=True)
class SchemeNumbers(Listed):
    """A kind of scheme with its numbers. The scheme keeps r copies, or r parity blocks for a group
    of roles, and so survives r lost nodes. The number r is ``EpochRecord.replicas``, and 0 for the
    two local kinds.

    ``group``: the maximum number of roles that share parity blocks (k); 0 without parity.
    """

    kind: SchemeKind
    group: int = 0


@dataclass(frozen=True)
class ProtectionPlan(Coded):
    """The plan in an epoch record, so that all nodes follow the same plan; it changes by epoch.

    ``scheme`` applies to the shard parts of all roles. Extras are small: they are sent as copies
    unless the scheme is local. ``every``: only generations of iterations that it divides are
    protected (and can be restored).
    """

    scheme: SchemeNumbers = SchemeNumbers(SchemeKind.BUDDY)
    every: int = 1

    @property
    def kind(self) -> SchemeKind:
        """Return the kind of the scheme."""
        return self.scheme.kind


def first_plan(settings: Settings) -> ProtectionPlan:
    """Return the plan with which a run starts."""
    every = 1 if settings.cadence == "auto" else int(settings.cadence)
    return plan_of_kind(settings.protection, every, settings.parity_group)


def plan_of_kind(kind: str, every: int, group: int) -> ProtectionPlan:
    """Return the plan with a scheme of this kind. Raises ValueError for an unknown kind."""
    scheme = SchemeNumbers(SchemeKind(kind), group if kind == SchemeKind.PARITY else 0)
    return ProtectionPlan(scheme, every)


def losses_survived(settings: Settings, plan: ProtectionPlan | None = None) -> int:
    """Return the number of lost nodes that a plan survives, the value of EpochRecord.replicas: its
    copies, or the parity blocks of a group. ``plan``: by default the first plan of the run.
    """
    return 0 if (plan or first_plan(settings)).kind.is_local else settings.copies


def format_plan(plan: ProtectionPlan) -> str:
    """Return a plan as text for users: ``buddy``, or ``parity(4); every 3 iterations``."""
    cadence = "" if plan.every == 1 else f"; every {plan.every} iterations"
    return format_scheme(plan.scheme) + cadence


def format_scheme(scheme: SchemeNumbers) -> str:
    """Return the kind, as in ``parity(4)`` (groups of 4)."""
    if scheme.kind is SchemeKind.PARITY:
        return f"{scheme.kind}({scheme.group})"
    return str(scheme.kind)


def describe_plan(plan: ProtectionPlan, replicas: int) -> str:
    """Return a description of a plan for users; ``replicas`` as in EpochRecord."""
    scheme, plural = plan.scheme, "" if replicas == 1 else "s"
    description = {
        SchemeKind.BUDDY: f"{replicas} cop{'y' if replicas == 1 else 'ies'}",
        SchemeKind.PARITY: f"{replicas} block{plural} for up to {scheme.group} roles",
        SchemeKind.LOCAL: "no node may be lost",
        SchemeKind.LOCAL_TWICE: "each generation twice on its node; survives no lost node",
    }[scheme.kind]
    cadence = "" if plan.every == 1 else f", every {plan.every} iterations"
    return f"{scheme.kind} ({description}){cadence}"


def max_lost_iterations(every: int, max_lag: int, *, spans_the_world: bool) -> int:
    """Return the maximum number of finished iterations that a failure makes a job compute again.

    Every ``every``-th iteration is due: it has a generation. The update of a due iteration p passes
    its gate when the generation of the due iteration g = p - (``max_lag`` + 1) * ``every`` is
    committed. Just before that the newest common generation is that of g - ``every``, and p - 1 is
    the newest finished iteration.

    ``spans_the_world``: a collective keeps all roles together at their gates. Without it a role
    whose own generation is committed may have finished p already.
    """
    return (2 + max_lag) * every - (1 if spans_the_world else 0)
