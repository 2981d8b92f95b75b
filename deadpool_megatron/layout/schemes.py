"""How state is protected: the schemes, and the plan of an epoch that names one for each part. Pure.

Schemes: ``buddy`` copies to other nodes (DeadPool, FFTrainer); ``parity`` keeps erasure-coded
blocks over a group of roles (REFT's AEC); ``local`` keeps the own node's slots only (REFT's SMP);
``recompute`` copies the whole state now and then and reduced gradients in between (REFT's AOR).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from deadpool_megatron.settings import Settings

ANY = "*"


class Kind(StrEnum):
    """What is done with the bytes of a part."""

    BUDDY = "buddy"
    PARITY = "parity"
    LOCAL = "local"
    RECOMPUTE = "recompute"


@dataclass(frozen=True)
class Scheme:
    """One scheme with its numbers. How many lost nodes it survives is EpochRecord.replicas (r):
    r copies, or r parity blocks for ``group`` roles; 0 for ``local``.

    ``group``: most roles that share parity blocks (k). ``full_every``: a whole copy every so many
    generations, gradients in between.
    """

    kind: Kind
    group: int = 0
    full_every: int = 1

    def to_list(self) -> list[Any]:
        """JSON form."""
        return [str(self.kind), self.group, self.full_every]

    @staticmethod
    def from_list(values: Any) -> Scheme:
        """Inverse of :meth:`to_list`."""
        kind, group, full_every = values
        return Scheme(Kind(kind), int(group), int(full_every))


@dataclass(frozen=True)
class Rule:
    """``scheme`` for shard parts called ``part`` of roles on nodes of ``domain``; ANY for all."""

    part: str
    domain: str
    scheme: Scheme


@dataclass(frozen=True)
class ProtectionPlan:
    """Part of an epoch record, so that all nodes follow the same one; it changes with the epoch.

    The first rule that fits a shard part counts. Extras are small: they travel as copies wherever
    the scheme is not ``local``. ``every``: only generations of iterations that it divides are
    protected (and can be restored).
    """

    rules: tuple[Rule, ...] = (Rule(ANY, ANY, Scheme(Kind.BUDDY)),)
    every: int = 1

    def scheme(self, part: str, domain: str) -> Scheme:
        """The scheme of a shard part of a role whose node lies in ``domain``."""
        for rule in self.rules:
            if rule.part in (ANY, part) and rule.domain in (ANY, domain):
                return rule.scheme
        return Scheme(Kind.BUDDY)

    @property
    def kinds(self) -> frozenset[Kind]:
        """All kinds that the rules name."""
        return frozenset(rule.scheme.kind for rule in self.rules)

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        rules = [[rule.part, rule.domain, rule.scheme.to_list()] for rule in self.rules]
        return {"rules": rules, "every": self.every}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> ProtectionPlan:
        """Inverse of :meth:`to_dict`."""
        rules = tuple(
            Rule(str(part), str(domain), Scheme.from_list(scheme))
            for part, domain, scheme in values["rules"]
        )
        return ProtectionPlan(rules, int(values["every"]))


def first_plan(settings: Settings) -> ProtectionPlan:
    """The plan that a run starts with; ``mixed`` takes another one where copies do not fit."""
    kind = "buddy" if settings.protection == "mixed" else settings.protection
    every = 1 if settings.cadence == "auto" else int(settings.cadence)
    return uniform(kind, settings, every, settings.parity_group)


def uniform(kind: str, settings: Settings, every: int, group: int) -> ProtectionPlan:
    """One scheme for everything. Raises ValueError for a kind that there is not."""
    scheme = Scheme(
        Kind(kind),
        group=group if kind == Kind.PARITY else 0,
        full_every=settings.full_every if kind == Kind.RECOMPUTE else 1,
    )
    return ProtectionPlan((Rule(ANY, ANY, scheme),), every)


def losses_survived(settings: Settings, plan: ProtectionPlan | None = None) -> int:
    """The value of EpochRecord.replicas: copies, or parity blocks of a group.

    ``plan``: another one than the run starts with.
    """
    kinds = (plan or first_plan(settings)).kinds
    return 0 if Kind.LOCAL in kinds else settings.replicas


def plan_in_words(plan: ProtectionPlan) -> str:
    """For people: ``buddy``, or ``shard1: parity(4), else buddy; every 3 iterations``."""
    rules = [f"{_whose(rule)}{scheme_in_words(rule.scheme)}" for rule in plan.rules]
    cadence = "" if plan.every == 1 else f"; every {plan.every} iterations"
    return ", ".join(rules) + cadence


def scheme_in_words(scheme: Scheme) -> str:
    """``parity(4)``: groups of 4; ``recompute(8)``: a whole copy every 8 generations."""
    if scheme.kind is Kind.PARITY:
        return f"{scheme.kind}({scheme.group})"
    if scheme.kind is Kind.RECOMPUTE:
        return f"{scheme.kind}({scheme.full_every})"
    return str(scheme.kind)


def in_words(plan: ProtectionPlan, replicas: int) -> str:
    """What a plan does, for people; ``replicas`` as in EpochRecord."""
    found = []
    for rule in plan.rules:
        scheme, many = rule.scheme, "" if replicas == 1 else "s"
        what = {
            Kind.BUDDY: f"{replicas} cop{'y' if replicas == 1 else 'ies'}",
            Kind.PARITY: f"{replicas} block{many} for up to {scheme.group} roles",
            Kind.LOCAL: "no node may be lost",
            Kind.RECOMPUTE: f"whole every {scheme.full_every} iterations, gradients in between",
        }[scheme.kind]
        where = [
            f"{name} {value}"
            for name, value in (("part", rule.part), ("domain", rule.domain))
            if value != ANY
        ]
        found.append(" ".join([f"{scheme.kind} ({what})", *where]))
    each = "" if plan.every == 1 else f", every {plan.every} iterations"
    return "; ".join(found) + each


def _whose(rule: Rule) -> str:
    if (rule.part, rule.domain) == (ANY, ANY):
        return ""
    part = "" if rule.part == ANY else rule.part
    domain = "" if rule.domain == ANY else f"in {rule.domain}"
    return f"{' '.join(filter(None, (part, domain)))}: "


def may_recompute(settings: Settings) -> bool:
    """Whether slots have room for steps: fixed for a run, for it is part of the layout."""
    return settings.protection == Kind.RECOMPUTE


def recomputes(plan: ProtectionPlan) -> bool:
    """Whether members have to keep the steps to their generations."""
    return Kind.RECOMPUTE in plan.kinds


def without_recompute(plan: ProtectionPlan) -> ProtectionPlan:
    """The same plan with whole copies of every generation."""
    rules = tuple(
        replace(rule, scheme=Scheme(Kind.BUDDY)) if rule.scheme.kind is Kind.RECOMPUTE else rule
        for rule in plan.rules
    )
    return replace(plan, rules=rules)
