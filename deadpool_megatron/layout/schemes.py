"""Ways to protect state: the schemes, and the plan of an epoch that names one. Pure.

Schemes: ``buddy`` copies to other nodes (DeadPool, FFTrainer); ``parity`` keeps erasure-coded
blocks over a group of roles (REFT's AEC); ``local`` keeps the own node's slots only (REFT's SMP),
``local-twice`` a second copy of them in the memory of the same node (REFT's ARC);
``recompute`` copies the whole state now and then and reduced gradients in between (REFT's AOR).
"""

from __future__ import annotations

from dataclasses import dataclass

from deadpool_megatron.settings import SchemeKind, Settings
from deadpool_megatron.wire.forms import Coded, Listed

MAX_BLOCKS = 256  # of a parity group, k + m: a limit of codes over bytes


@dataclass(frozen=True)
class SchemeNumbers(Listed):
    """One scheme with its numbers. How many lost nodes it survives is EpochRecord.replicas (r):
    r copies, or r parity blocks for ``group`` roles; 0 for both that stay on the own node.

    ``group``: most roles that share parity blocks (k). ``full_every``: a whole copy every so many
    generations, gradients in between.
    """

    kind: SchemeKind
    group: int = 0
    full_every: int = 1


@dataclass(frozen=True)
class ProtectionPlan(Coded):
    """Part of an epoch record, so that all nodes follow the same one; it changes with the epoch.

    ``scheme`` holds for the shard parts of all roles. Extras are small: they travel as copies
    where anything leaves the own node. ``every``: only generations of iterations that it divides
    are protected (and can be restored).
    """

    scheme: SchemeNumbers = SchemeNumbers(SchemeKind.BUDDY)
    every: int = 1

    @property
    def kind(self) -> SchemeKind:
        """Of the scheme."""
        return self.scheme.kind


def first_plan(settings: Settings) -> ProtectionPlan:
    """The plan that a run starts with."""
    every = 1 if settings.cadence == "auto" else int(settings.cadence)
    return plan_of_kind(settings.protection, settings, every, settings.parity_group)


def plan_of_kind(kind: str, settings: Settings, every: int, group: int) -> ProtectionPlan:
    """The plan with a scheme of this kind. Raises ValueError for one that there is not."""
    scheme = SchemeNumbers(
        SchemeKind(kind),
        group=group if kind == SchemeKind.PARITY else 0,
        full_every=settings.full_every if kind == SchemeKind.RECOMPUTE else 1,
    )
    return ProtectionPlan(scheme, every)


def losses_survived(settings: Settings, plan: ProtectionPlan | None = None) -> int:
    """The value of EpochRecord.replicas: copies, or parity blocks of a group.

    ``plan``: another one than the run starts with.
    """
    return 0 if (plan or first_plan(settings)).kind.is_local else settings.replicas


def format_plan(plan: ProtectionPlan) -> str:
    """For people: ``buddy``, or ``parity(4); every 3 iterations``."""
    cadence = "" if plan.every == 1 else f"; every {plan.every} iterations"
    return format_scheme(plan.scheme) + cadence


def format_scheme(scheme: SchemeNumbers) -> str:
    """``parity(4)``: groups of 4; ``recompute(8)``: a whole copy every 8 generations."""
    if scheme.kind is SchemeKind.PARITY:
        return f"{scheme.kind}({scheme.group})"
    if scheme.kind is SchemeKind.RECOMPUTE:
        return f"{scheme.kind}({scheme.full_every})"
    return str(scheme.kind)


def in_words(plan: ProtectionPlan, replicas: int) -> str:
    """Return what a plan does, for people; ``replicas`` as in EpochRecord."""
    scheme, many = plan.scheme, "" if replicas == 1 else "s"
    what = {
        SchemeKind.BUDDY: f"{replicas} cop{'y' if replicas == 1 else 'ies'}",
        SchemeKind.PARITY: f"{replicas} block{many} for up to {scheme.group} roles",
        SchemeKind.LOCAL: "no node may be lost",
        SchemeKind.LOCAL_TWICE: "each generation twice on its node; survives no lost node",
        SchemeKind.RECOMPUTE: f"whole every {scheme.full_every} iterations, gradients in between",
    }[scheme.kind]
    each = "" if plan.every == 1 else f", every {plan.every} iterations"
    return f"{scheme.kind} ({what}){each}"


def recomputes(plan: ProtectionPlan) -> bool:
    """Return whether members have to keep the steps to their generations."""
    return plan.kind is SchemeKind.RECOMPUTE


def most_lost(every: int, max_lag: int, *, spans_the_world: bool) -> int:
    """The most finished iterations that one failure makes a job compute again.

    The update of a due iteration p passes its gate when the generation ``max_lag`` + 1 due ones
    before p is committed. Just before that the resume point is one more before it, and p - 1 is the
    newest finished iteration. ``spans_the_world``: a collective keeps all roles at their gates
    together; without it some role may have finished p already.
    """
    return (2 + max_lag) * every - (1 if spans_the_world else 0)
