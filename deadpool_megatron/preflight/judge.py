"""Facts -> judgement: which nodes may train, which only if no better one is left, which may not.

That the majority's versions are right, and that a node is slow when it is slow beside the others,
needs no list of good values; starting with more nodes, testing, and leaving out the worst is what
sites do by hand (ezpz on Aurora and Polaris, the BLOOM run on Jean Zay). Which links are measured
is dealt out so that no node takes part in two measurements at once. Pure functions.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from deadpool_megatron.preflight.facts import HostFacts, Link, Needs, NodeReport
from deadpool_megatron.preflight.health import Health

# Containers get 64 MiB of shared memory unless told otherwise: only a tiny model fits in it.
CONTAINER_SHM_BYTES = 64 << 20
LEAST_OPEN_FILES = 1024
MOST_CLOCK_SECONDS = 1.0
# A node is weak when its link is slower than this share of the median.
LEAST_RATE_SHARE = 0.5
# Nodes compute the same with different drivers.
_MAY_DIFFER = ("nvidia driver",)
_GB = 1e9
Pair = tuple[int, int]


class Standing(enum.StrEnum):
    """The use that a node is of."""

    GOOD = "good"
    WEAK = "weak"  # trains only where no good node is left
    LEFT_OUT = "left out"


@dataclass(frozen=True)
class Finding:
    """One thing wrong with a node, what that makes of it, and what to do."""

    standing: Standing
    text: str


@dataclass(frozen=True)
class Judgement:
    """The standing of a node, and what was found against it."""

    standing: Standing = Standing.GOOD
    reasons: tuple[str, ...] = ()

    @staticmethod
    def of(findings: Sequence[Finding]) -> Judgement:
        """Returns the judgement that findings amount to: the worst of them counts."""
        return Judgement(_worst(findings), tuple(finding.text for finding in findings))

    @property
    def text(self) -> str:
        """All reasons in one line."""
        return "; ".join(self.reasons)


@dataclass(frozen=True)
class Agreed:
    """The things that the nodes of a run have in common: versions of components, and whether there
    are GPUs. Nodes that join later are held against it.
    """

    versions: Mapping[str, str] = field(default_factory=dict)
    has_gpus: bool = False


@dataclass(frozen=True)
class Speed:
    """Of a node's link, in bytes per second, each direction at its best of all measurements."""

    sent: float
    received: float

    @property
    def slower(self) -> float:
        """The slower direction."""
        return min(self.sent, self.received)


def agree(facts: Iterable[HostFacts]) -> Agreed:
    """Returns what most of the nodes have; of equally many, what the first of them has."""
    known = list(facts)
    versions = {}
    for name in sorted({name for one in known for name in one.versions}):
        counts = Counter(one.versions.get(name, "") for one in known)
        versions[name] = counts.most_common(1)[0][0]
    return Agreed(versions, any(one.gpus for one in known))


def judge_one(facts: HostFacts | None, agreed: Agreed, needs: Needs) -> list[Finding]:
    """Returns what is wrong with a node by itself and beside what the run has agreed on; nothing
    for a node that did not tell its facts.
    """
    if facts is None:
        return []
    found = problems(facts, needs)
    # Mostly they are equal, and there may be thousands of nodes.
    differ = facts.versions != agreed.versions
    for name in sorted(agreed.versions.keys() | facts.versions.keys()) if differ else ():
        here, common = facts.versions.get(name, ""), agreed.versions.get(name, "")
        if here != common:
            standing = Standing.WEAK if name in _MAY_DIFFER else Standing.LEFT_OUT
            text = (
                f"{name} is {here or 'not there'}, on most nodes it is"
                f" {common or 'not there'}: use the same environment or image"
            )
            found.append(Finding(standing, text))
    if agreed.has_gpus and facts.gpus < needs.gpus_per_node:
        found.append(
            _out(
                f"{facts.gpus} GPUs, --nproc-per-node is {needs.gpus_per_node}: look at"
                " nvidia-smi and dmesg there"
            )
        )
    return found


def judge(reports: Iterable[NodeReport], needs: Needs) -> dict[int, Judgement]:
    """Returns the judgement of each node, with the links to the others as far as they are known.

    It does not depend on the order of the reports. Each node appears once in them.
    """
    ordered = sorted(reports, key=lambda report: report.node)
    agreed = agree(report.facts for report in ordered if report.facts is not None)
    findings = {report.node: judge_one(report.facts, agreed, needs) for report in ordered}
    _compare_reach(_kept(ordered, findings), findings)
    kept = _kept(ordered, findings)
    _compare_clocks(kept, findings)
    _compare_speeds(kept, findings)
    return {node: Judgement.of(found) for node, found in findings.items()}


def problems(facts: HostFacts, needs: Needs) -> list[Finding]:
    """Returns what is wrong with a node by itself, without a look at the others."""
    found = []
    if facts.noted:
        found.append(_out(facts.noted))
    if facts.health.health is Health.OUT:
        found.append(_out(f"its health command says: {facts.health.text}"))
    elif facts.health.health is Health.SPARE_ONLY:
        found.append(_weak(f"its health command says: {facts.health.text}"))
    if not facts.interface_up:
        found.append(_out(f"interface {facts.interface} of {facts.address} is down"))
    if facts.shm_free_bytes < needs.shm_bytes:
        found.append(
            _out(
                f"/dev/shm has {facts.shm_free_bytes / _GB:.1f} GB free,"
                f" {needs.shm_bytes / _GB:.1f} GB are needed: 'deadpool clean', or enlarge it"
                " (mount -o remount,size=..., docker --shm-size)"
            )
        )
    elif facts.shm_bytes <= CONTAINER_SHM_BYTES:
        found.append(
            _weak(
                f"/dev/shm has {facts.shm_bytes >> 20} MiB, as containers get by default:"
                " enlarge it (docker --shm-size, emptyDir with medium Memory)"
            )
        )
    if facts.memory_bytes < needs.shm_bytes:
        found.append(
            _out(
                f"{facts.memory_bytes / _GB:.1f} GB of memory are available, the slots need"
                f" {needs.shm_bytes / _GB:.1f} GB: end what else runs there"
            )
        )
    least = max(needs.shm_bytes, CONTAINER_SHM_BYTES)
    if facts.gpus and facts.memlock_bytes is not None and facts.memlock_bytes < least:
        found.append(
            _weak(
                f"only {facts.memlock_bytes >> 10} KiB may be locked in memory: 'ulimit -l"
                " unlimited', for Slurm LimitMEMLOCK=infinity of slurmd"
            )
        )
    if facts.open_files is not None and facts.open_files < LEAST_OPEN_FILES:
        found.append(
            _weak(f"only {facts.open_files} open files: 'ulimit -n {LEAST_OPEN_FILES}' or more")
        )
    return found


def speeds(reports: Iterable[NodeReport]) -> dict[int, Speed | None]:
    """Returns the speed of each node's link; None for one that was not measured in both directions.

    What a node has sent is what others say that they have received from it.
    """
    known = {report.node: report for report in reports}
    received = dict.fromkeys(known, 0.0)
    sent = dict.fromkeys(known, 0.0)
    for node, report in known.items():
        for link in report.links:
            if link.bytes_per_second is not None:
                received[node] = max(received[node], link.bytes_per_second)
                if link.peer in sent:
                    sent[link.peer] = max(sent[link.peer], link.bytes_per_second)
    return {
        node: Speed(sent[node], received[node]) if sent[node] and received[node] else None
        for node in known
    }


def slow_or_unknown(found: Mapping[int, Speed | None]) -> tuple[int, ...]:
    """Returns nodes without a speed, and those below half the median: they are worth a second
    look.
    """
    known = [speed.slower for speed in found.values() if speed is not None]
    least = LEAST_RATE_SHARE * median(known) if known else 0.0
    return tuple(
        node for node, speed in sorted(found.items()) if speed is None or speed.slower < least
    )


def clocks(reports: Sequence[NodeReport]) -> dict[int, tuple[float, float]]:
    """Returns for each node its wall clock minus that of the lowest one, and how wrong that can be
    at most. Nodes that did not reach the lowest one are missing.
    """
    if not reports:
        return {}
    first = min(report.node for report in reports)
    found = {first: (0.0, 0.0)}
    for report in reports:
        trips = [
            (link.round_trip_seconds, -link.clock_seconds)
            for link in report.links
            if link.peer == first and not link.error
        ]
        if trips:
            trip, offset = min(trips)
            found[report.node] = (offset, trip / 2)
    return found


@dataclass(frozen=True)
class Checkup:
    """Links are being measured. ``number``: of the question that the ``awaited`` nodes have not
    answered yet; ``until``: how long they have for it. ``planned``: all nodes have tried all links,
    and ``turns`` are what is asked next, one after the other. ``measured``: pairs whose speed was
    asked for; ``looks``: how often slow ones were measured again. ``links``: what nodes have found.
    """

    number: int = 0
    awaited: frozenset[int] = frozenset()
    until: float = 0.0
    planned: bool = False
    turns: tuple[tuple[Pair, ...], ...] = ()
    measured: tuple[Pair, ...] = ()
    looks: int = 0
    links: Mapping[int, tuple[Link, ...]] = field(default_factory=dict)


def first_pairs(nodes: Iterable[int]) -> list[Pair]:
    """Returns each node with the next one, and with the one half the ring away.

    With three nodes or more each has two partners: a slow link has two ends, and the end that is
    quick with another partner is not the weak one.
    """
    ring = sorted(nodes)
    pairs = set()
    for distance in (1, len(ring) // 2):
        for place, node in enumerate(ring):
            peer = ring[(place + distance) % len(ring)]
            if peer != node:
                pairs.add((min(node, peer), max(node, peer)))
    return sorted(pairs)


def second_look(
    doubtful: Sequence[int], nodes: Iterable[int], measured: Iterable[Pair]
) -> list[Pair]:
    """Returns each doubtful node with another partner than before, one that is not doubtful if
    possible. They are dealt out to the partners one after another; where all are doubtful, to each
    other.
    """
    known = {frozenset(pair) for pair in measured}
    everyone = sorted(nodes)
    partners = [node for node in everyone if node not in doubtful]
    pairs = []
    for place, node in enumerate(doubtful):
        order = [*partners[place % max(1, len(partners)) :], *partners, *everyone]
        partner = next((p for p in order if p != node and frozenset((node, p)) not in known), None)
        if partner is not None:
            pairs.append((node, partner))
    return pairs


def rounds(pairs: Iterable[Pair]) -> list[list[Pair]]:
    """Returns the pairs in rounds that are measured one after another; each node is once in a
    round.
    """
    found: list[list[Pair]] = []
    busy: list[set[int]] = []
    for pair in pairs:
        place = next((i for i, taken in enumerate(busy) if not taken & set(pair)), len(busy))
        if place == len(busy):
            found.append([])
            busy.append(set())
        found[place].append(pair)
        busy[place].update(pair)
    return found


def _out(text: str) -> Finding:
    return Finding(Standing.LEFT_OUT, text)


def _weak(text: str) -> Finding:
    return Finding(Standing.WEAK, text)


def _worst(findings: Sequence[Finding]) -> Standing:
    if not findings:
        return Standing.GOOD
    out = any(finding.standing is Standing.LEFT_OUT for finding in findings)
    return Standing.LEFT_OUT if out else Standing.WEAK


def _kept(
    reports: Sequence[NodeReport], findings: Mapping[int, Sequence[Finding]]
) -> list[NodeReport]:
    return [report for report in reports if _worst(findings[report.node]) is not Standing.LEFT_OUT]


def _compare_reach(reports: Sequence[NodeReport], findings: Mapping[int, list[Finding]]) -> None:
    """Leave out the node with most broken links until none is broken between those that remain."""
    broken: dict[int, dict[int, str]] = {report.node: {} for report in reports}
    count = len(broken)
    for report in reports:
        for link in report.links:
            if link.error and link.peer in broken and link.peer != report.node:
                broken[report.node].setdefault(link.peer, link.error)
                broken[link.peer].setdefault(report.node, link.error)
    while broken:
        worst = max(broken, key=lambda node: (len(broken[node]), node))
        if not broken[worst]:
            return
        peers = sorted(broken[worst])
        findings[worst].append(
            _out(
                f"no connection with {len(peers)} of {count - 1} nodes, one is node"
                f" {peers[0]} ({broken[worst][peers[0]]}): look at its network and firewall"
            )
        )
        for peer in peers:
            del broken[peer][worst]
        del broken[worst]


def _compare_clocks(reports: Sequence[NodeReport], findings: Mapping[int, list[Finding]]) -> None:
    known = clocks(reports)
    middle = median(offset for offset, _ in known.values()) if known else 0.0
    for node, (offset, error) in known.items():
        off = offset - middle
        if abs(off) - error > MOST_CLOCK_SECONDS:
            findings[node].append(
                _weak(f"its clock is {off:+.1f} s off: look at chrony or ntpd there")
            )


def _compare_speeds(reports: Sequence[NodeReport], findings: Mapping[int, list[Finding]]) -> None:
    found = speeds(reports)
    known = [speed.slower for speed in found.values() if speed is not None]
    for node in slow_or_unknown(found):
        speed = found[node]
        if speed is not None:
            findings[node].append(
                _weak(
                    f"its link carries {speed.slower / _GB:.2f} GB/s, the median is"
                    f" {median(known) / _GB:.2f} GB/s: look at its card, cable and switch port"
                )
            )
