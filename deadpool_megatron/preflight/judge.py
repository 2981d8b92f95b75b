"""Facts -> verdict: which nodes may train, which may only wait as spares, which are left out. Pure.

That the majority's versions are right, and that a node is slow when it is slow beside the others,
needs no list of good values; starting with more nodes, testing, and leaving out the worst is what
sites do by hand (ezpz on Aurora and Polaris, the BLOOM run on Jean Zay).
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from deadpool_megatron.preflight.facts import Missing, NodeFacts, NodeReport, Wanted

# Containers get 64 MiB of shared memory unless told otherwise: no model fits in it.
CONTAINER_SHM_BYTES = 64 << 20
LEAST_OPEN_FILES = 1024
MOST_CLOCK_SECONDS = 1.0
# A node is weak when its link is slower than this share of the median.
LEAST_RATE_SHARE = 0.5
_GB = 1e9


class Standing(enum.StrEnum):
    """What a node is good for."""

    GOOD = "good"
    SPARE = "spare"
    LEFT_OUT = "left out"


@dataclass(frozen=True)
class Finding:
    """One thing wrong with a node, what that makes of it, and what to do."""

    standing: Standing
    text: str


@dataclass(frozen=True)
class NodeVerdict:
    """``assigned``: the node id to take in the run; None when left out."""

    node: int
    hostname: str
    standing: Standing
    assigned: int | None
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Verdict:
    """``nodes`` in the order of their ids in the check; ``advice`` is empty when all is well."""

    ok: bool
    nodes: tuple[NodeVerdict, ...]
    advice: str


def judge(reports: Iterable[NodeReport], missing: Iterable[Missing], wanted: Wanted) -> Verdict:
    """The verdict does not depend on the order of its inputs. Each node appears once in them."""
    ordered = sorted(reports, key=lambda report: report.node)
    findings = {report.node: problems(report.facts, wanted) for report in ordered}
    _compare_versions(ordered, findings)
    _compare_gpus(ordered, findings, wanted)
    kept = _kept(ordered, findings)
    _compare_reach(kept, findings)
    kept = _kept(kept, findings)
    _compare_clocks(kept, findings)
    _compare_rates(kept, findings)

    good = [report for report in ordered if not findings[report.node]]
    weak = [report for report in _kept(ordered, findings) if findings[report.node]]
    order = [*racks_together(good), *racks_together(weak)]
    assigned = {report.node: place for place, report in enumerate(order)}
    verdicts = [
        NodeVerdict(
            node=report.node,
            hostname=report.facts.hostname,
            standing=_standing(findings[report.node]),
            assigned=assigned.get(report.node),
            reasons=tuple(finding.text for finding in findings[report.node]),
        )
        for report in ordered
    ]
    verdicts += [
        NodeVerdict(absent.node, absent.hostname, Standing.LEFT_OUT, None, (absent.reason,))
        for absent in missing
    ]
    verdicts.sort(key=lambda verdict: verdict.node)
    ok = len(good) >= wanted.nodes
    return Verdict(ok, tuple(verdicts), "" if ok else _advice(verdicts, len(good), wanted))


def problems(facts: NodeFacts, wanted: Wanted) -> list[Finding]:
    """What is wrong with a node by itself, without a look at the others."""
    found = []
    if not facts.interface_up:
        found.append(_out(f"interface {facts.interface} of {facts.address} is down"))
    if facts.shm_free_bytes < wanted.shm_bytes:
        found.append(
            _out(
                f"/dev/shm has {facts.shm_free_bytes / _GB:.1f} GB free,"
                f" {wanted.shm_bytes / _GB:.1f} GB are needed: 'deadpool clean', or enlarge it"
                " (mount -o remount,size=..., docker --shm-size)"
            )
        )
    elif facts.shm_bytes <= CONTAINER_SHM_BYTES:
        found.append(
            _out(
                f"/dev/shm has {facts.shm_bytes >> 20} MiB, as containers get by default:"
                " enlarge it (docker --shm-size, emptyDir with medium Memory)"
            )
        )
    if facts.memory_bytes < wanted.shm_bytes:
        found.append(
            _out(
                f"{facts.memory_bytes / _GB:.1f} GB of memory are available, the slots need"
                f" {wanted.shm_bytes / _GB:.1f} GB: end what else runs there"
            )
        )
    least = max(wanted.shm_bytes, CONTAINER_SHM_BYTES)
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


def racks_together(reports: Sequence[NodeReport]) -> list[NodeReport]:
    """Racks in the order of their first node; a node without a rack is one of its own."""
    first: dict[str, int] = {}
    for report in sorted(reports, key=lambda report: report.node):
        first.setdefault(_rack(report), report.node)
    return sorted(reports, key=lambda report: (first[_rack(report)], report.node))


def slow_or_unknown(rates: Mapping[int, float | None]) -> tuple[int, ...]:
    """Nodes without a rate, and those below half the median: they are worth a second look."""
    known = [rate for rate in rates.values() if rate is not None]
    least = LEAST_RATE_SHARE * median(known) if known else 0.0
    return tuple(node for node, rate in sorted(rates.items()) if rate is None or rate < least)


def _out(text: str) -> Finding:
    return Finding(Standing.LEFT_OUT, text)


def _weak(text: str) -> Finding:
    return Finding(Standing.SPARE, text)


def _standing(findings: Sequence[Finding]) -> Standing:
    if not findings:
        return Standing.GOOD
    out = any(finding.standing is Standing.LEFT_OUT for finding in findings)
    return Standing.LEFT_OUT if out else Standing.SPARE


def _kept(
    reports: Sequence[NodeReport], findings: Mapping[int, Sequence[Finding]]
) -> list[NodeReport]:
    return [
        report for report in reports if _standing(findings[report.node]) is not Standing.LEFT_OUT
    ]


def _rack(report: NodeReport) -> str:
    return report.facts.domain or f"node{report.node}"


def _compare_versions(reports: Sequence[NodeReport], findings: Mapping[int, list[Finding]]) -> None:
    for name in sorted({name for report in reports for name in report.facts.versions}):
        # Of equally many, the value of the lowest node.
        counts = Counter(report.facts.versions.get(name, "") for report in reports)
        common = counts.most_common(1)[0][0]
        for report in reports:
            here = report.facts.versions.get(name, "")
            if here != common:
                findings[report.node].append(
                    _out(
                        f"{name} is {here or 'not there'}, on most nodes it is"
                        f" {common or 'not there'}: use the same environment or image"
                    )
                )


def _compare_gpus(
    reports: Sequence[NodeReport], findings: Mapping[int, list[Finding]], wanted: Wanted
) -> None:
    if not any(report.facts.gpus for report in reports):
        return  # a cluster without GPUs
    for report in reports:
        if report.facts.gpus < wanted.nproc_per_node:
            findings[report.node].append(
                _out(
                    f"{report.facts.gpus} GPUs, --nproc-per-node is {wanted.nproc_per_node}:"
                    " look at nvidia-smi and dmesg there"
                )
            )


def _compare_reach(reports: Sequence[NodeReport], findings: Mapping[int, list[Finding]]) -> None:
    """Leave out the node with most broken links until none is broken between those that remain."""
    names = {report.node: report.facts.hostname for report in reports}
    broken: dict[int, dict[int, str]] = {node: {} for node in names}
    for report in reports:
        for peer, reason in report.unreached.items():
            if peer in names and peer != report.node:
                broken[report.node].setdefault(peer, reason)
                broken[peer].setdefault(report.node, reason)
    while broken:
        worst = max(broken, key=lambda node: (len(broken[node]), node))
        if not broken[worst]:
            return
        peers = sorted(broken[worst])
        findings[worst].append(
            _out(
                f"no connection with {len(peers)} of {len(names) - 1} nodes, one is node"
                f" {peers[0]} ({broken[worst][peers[0]]}): look at its network and firewall"
            )
        )
        for peer in peers:
            del broken[peer][worst]
        del broken[worst]


def _compare_clocks(reports: Sequence[NodeReport], findings: Mapping[int, list[Finding]]) -> None:
    offsets = {r.node: r.clock for r in reports if r.clock is not None}
    if not offsets:
        return
    middle = median(clock.offset_seconds for clock in offsets.values())
    for node, clock in offsets.items():
        off = clock.offset_seconds - middle
        if abs(off) - clock.error_seconds > MOST_CLOCK_SECONDS:
            findings[node].append(
                _weak(f"its clock is {off:+.1f} s off: look at chrony or ntpd there")
            )


def _compare_rates(reports: Sequence[NodeReport], findings: Mapping[int, list[Finding]]) -> None:
    rates = {report.node: report.rate_bytes_per_second for report in reports}
    known = [rate for rate in rates.values() if rate is not None]
    for node in slow_or_unknown(rates):
        rate = rates[node]
        if rate is not None:
            findings[node].append(
                _weak(
                    f"its link carries {rate / _GB:.2f} GB/s, the median is"
                    f" {median(known) / _GB:.2f} GB/s: look at its card, cable and switch port"
                )
            )


def _advice(verdicts: Sequence[NodeVerdict], good: int, wanted: Wanted) -> str:
    bad = [verdict for verdict in verdicts if verdict.standing is not Standing.GOOD]
    # Where all nodes are on one host, leaving hosts out would leave nothing.
    clean = {verdict.hostname for verdict in verdicts if verdict.standing is Standing.GOOD}
    hosts = sorted({verdict.hostname for verdict in bad} - clean - {""})
    instead = f" (sbatch --exclude={','.join(hosts)})" if hosts else ""
    return (
        f"{good} good nodes, --nodes is {wanted.nodes}: mend what is named above, or take"
        f" others{instead}, or ask for more spares, then check again"
    )
