"""Which plans can protect a run, and which one ``mixed`` takes. Pure.

``mixed`` is copies if they fit, else the smallest parity group that does.

Copies need most memory and are safest; of parity groups the smaller ones are. So the first plan
that fits is the one to take. ``recompute`` is not among them: its gradients need room in every
slot, and slots are laid out before anything is chosen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec

from deadpool_megatron.layout.reckoning.demand import Scene, memory_needs
from deadpool_megatron.layout.schemes import (
    MOST_BLOCKS,
    Kind,
    ProtectionPlan,
    Scheme,
    losses_survived,
    plan_in_words,
    scheme_in_words,
)
from deadpool_megatron.settings import LONGEST_CADENCE, Settings

# Sizes of parity groups that are tried: larger ones save little more memory, and cost risk.
GROUP_SIZES = (2, 3, 4, 6, 8)


@dataclass(frozen=True)
class Lack:
    """A node whose memory does not do."""

    node: int
    needed_bytes: int
    has_bytes: int

    def in_words(self) -> str:
        """Return what the node would need, and what it has."""
        return (
            f"node {self.node} would need {sized(self.needed_bytes)} of memory for"
            f" generations and has {sized(self.has_bytes)}"
        )


@dataclass(frozen=True)
class Choice:
    """The plan to take, and why; ``lack``: of the sparest plan, where none fits."""

    plan: ProtectionPlan
    why: str
    lack: Lack | None = None


def choose(scene: Scene, budgets: Mapping[int, int], every: int = 1) -> Choice:
    """Return the first plan that fits, copies before parity and small groups before large ones.

    A plan that leaves every node room to take over roles goes before one that does not.
    ``budgets``: node -> bytes for generations; a node that is not in it has as much as it wants.
    ``every``: the cadence, which is chosen elsewhere.
    """
    roomy = replace(scene, roomy=True)
    lacks: list[Lack] = []  # of plans that were passed over, copies first
    tight: ProtectionPlan | None = None
    plan = ProtectionPlan()
    for plan in _plans(scene, every):
        # What lacks memory as it is lacks it with room for more, too.
        lack = lacking(plan, scene, budgets)
        if lack is None:
            tight = tight or plan
            lack = lacking(plan, roomy, budgets)
        if lack is None:
            return Choice(plan, _why(plan, "with room", lacks))
        lacks.append(lack)
    if tight is not None:
        return Choice(tight, _why(tight, "without room", lacks))
    return Choice(plan, "no scheme fits", lacks[-1])


def lacking(plan: ProtectionPlan, scene: Scene, budgets: Mapping[int, int]) -> Lack | None:
    """Return the node that lacks most memory for ``plan``; None where all have enough."""
    if not budgets:
        return None
    needs = memory_needs(plan, scene)
    found = [Lack(n, needs[n], has) for n, has in budgets.items() if needs.get(n, 0) > has]
    return max(found, key=lambda one: (one.needed_bytes - one.has_bytes, -one.node), default=None)


def largest_group(nodes: int, survived: int) -> int:
    """Return the largest parity group that is tried in a run of so many nodes, spares included;
    0 for none."""
    return max((size for size in GROUP_SIZES if size + survived <= nodes), default=0)


def _plans(scene: Scene, every: int) -> Iterator[ProtectionPlan]:
    schemes = [Scheme(Kind.BUDDY)]
    most = largest_group(len(scene.domains), scene.survived)
    schemes += [Scheme(Kind.PARITY, group=size) for size in GROUP_SIZES if size <= most]
    for scheme in schemes:
        yield ProtectionPlan(scheme, every)


def _why(plan: ProtectionPlan, room: str, lacks: Sequence[Lack]) -> str:
    """Return one line: what stands in the way of copies, where they are not taken."""
    text = f"{plan_in_words(plan)} fits, {room} to take over the roles of another node"
    if plan.kind is Kind.BUDDY:
        return text
    return f"{text}; for copies {lacks[0].in_words()}"


def sized(nbytes: int) -> str:
    """Three digits, GB or MB."""
    return f"{nbytes / 1e9:.3g} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.3g} MB"


def refusal(
    plan: ProtectionPlan,
    live_nodes: int,
    settings: Settings,
    present: ProtectionPlan | None = None,
) -> str:
    """Why the run cannot be protected by ``plan``, and what to do; empty when it can.

    ``live_nodes``: connected ones, spares included. ``present``: the plan so far, if there is one.
    Its schemes go on with what is left of the nodes, so they are no reason against another cadence.
    """
    scheme, kind = plan.scheme, plan.kind
    if not 1 <= plan.every <= LONGEST_CADENCE:
        return f"a cadence of {plan.every} is not between 1 and {LONGEST_CADENCE}"
    if kind is Kind.RECOMPUTE and settings.protection != Kind.RECOMPUTE:
        return (
            "recompute needs room for gradients in every slot, and slots are laid out at the start:"
            " start the run with --deadpool-protection recompute"
        )
    if kind is Kind.RECOMPUTE and plan.every > 1:
        return "recompute needs the gradients of every iteration: choose a cadence of 1"
    blocks = losses_survived(settings, plan)
    if kind is Kind.PARITY and blocks > 1 and find_spec("zfec") is None:
        return (
            f"parity with {blocks} blocks for each group needs the package zfec on all nodes:"
            " pip install 'deadpool-megatron[parity]'"
        )
    if kind is Kind.PARITY and scheme.group < 2:
        return f"a parity group has at least 2 roles, not {scheme.group}"
    if kind is Kind.PARITY and scheme.group + blocks > MOST_BLOCKS:
        return (
            f"a parity group has at most {MOST_BLOCKS - blocks} roles beside {blocks}"
            f" block{'' if blocks == 1 else 's'}, not {scheme.group}: choose a smaller --group"
        )
    needed, is_new = _nodes_needed(kind, blocks), present is None or scheme != present.scheme
    if is_new and live_nodes < needed:
        return (
            f"{scheme_in_words(scheme)} that survives {blocks} lost nodes needs at least {needed}"
            f" nodes, there are {live_nodes}: attach {needed - live_nodes} more"
        )
    return ""


def _nodes_needed(kind: Kind, survived: int) -> int:
    """The blocks of a group of two roles lie on as many nodes; a copy beside the own node."""
    return survived + (2 if kind is Kind.PARITY else 1)
