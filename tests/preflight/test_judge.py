"""The judgement as a function of facts: every rule, and which links are measured for it."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from deadpool_megatron.preflight.facts import HostFacts, Link, Needs, NodeReport
from deadpool_megatron.preflight.judge import (
    Judgement,
    Speed,
    Standing,
    clocks,
    first_pairs,
    judge,
    problems,
    rounds,
    speeds,
)

FACTS = HostFacts(
    hostname="",
    versions={"torch": "2.13.0", "python": "3.11.7"},
    shm_bytes=10**12,
    shm_free_bytes=10**12,
    memory_bytes=10**12,
    open_files=20000,
)
GOOD, WEAK, LEFT_OUT = Standing.GOOD, Standing.WEAK, Standing.LEFT_OUT


def report(node: int, *links: Link, **facts: Any) -> NodeReport:
    own = dataclasses.replace(FACTS, **{"hostname": f"host{node}", **facts})
    return NodeReport(node, own, links)


def standings(found: Mapping[int, Judgement]) -> list[Standing]:
    return [one.standing for _, one in sorted(found.items())]


def broken(*peers: int) -> tuple[Link, ...]:
    return tuple(Link(peer, "no answer in time") for peer in peers)


def test_the_majority_of_versions_is_right() -> None:
    odd = {"torch": "2.12.0", "python": "3.11.7"}
    found = judge([report(0, versions=odd), report(1), report(2)], Needs(2))
    assert standings(found) == [LEFT_OUT, GOOD, GOOD]
    assert "torch is 2.12.0, on most nodes it is 2.13.0" in found[0].text


def test_a_component_that_only_one_node_has_or_lacks() -> None:
    more = {**FACTS.versions, "transformer-engine": "2.0"}
    found = judge([report(0), report(1), report(2, versions=more)], Needs(2))
    assert "transformer-engine is 2.0, on most nodes it is not there" in found[2].text
    few = judge([report(0, versions={}), report(1), report(2)], Needs(2))
    assert "torch is not there, on most nodes it is 2.13.0" in few[0].text


def test_another_driver_makes_a_node_weak_only() -> None:
    drivers = [{**FACTS.versions, "nvidia driver": text} for text in ("570", "570", "560")]
    found = judge([report(n, versions=v) for n, v in enumerate(drivers)], Needs(2))
    assert standings(found) == [GOOD, GOOD, WEAK]


def test_a_node_that_says_nothing_is_not_blamed() -> None:
    found = judge([report(0), NodeReport(1), report(2)], Needs(3, shm_bytes=10**9))
    assert standings(found) == [GOOD, GOOD, GOOD]


def test_gpus_count_where_any_node_has_them() -> None:
    needs = Needs(2, gpus_per_node=8)
    assert standings(judge([report(0), report(1)], needs)) == [GOOD, GOOD]
    found = judge([report(0, gpus=8), report(1, gpus=7), report(2, gpus=0)], needs)
    assert standings(found) == [GOOD, LEFT_OUT, LEFT_OUT]
    assert "7 GPUs, --nproc-per-node is 8" in found[1].text
    found = judge([report(0, gpus=8), report(1, gpus=1)], Needs(2, gpus_per_node=0))
    assert standings(found) == [GOOD, GOOD]


def test_limits_of_a_node() -> None:
    needs = Needs(1, shm_bytes=50 * 10**9)
    low = dataclasses.replace(FACTS, shm_free_bytes=10**9, memory_bytes=10**9)
    assert [finding.standing for finding in problems(low, needs)] == [LEFT_OUT, LEFT_OUT]
    container = dataclasses.replace(FACTS, shm_bytes=64 << 20, shm_free_bytes=64 << 20)
    (small,) = problems(container, Needs(1))
    assert small.standing is WEAK, "a small model fits"
    assert "as containers get by default" in small.text
    locked = dataclasses.replace(FACTS, memlock_bytes=8 << 20)
    assert problems(locked, needs) == []  # nothing is pinned without a GPU
    pinned = problems(dataclasses.replace(locked, gpus=8), needs)
    assert [finding.standing for finding in pinned] == [WEAK]
    assert "only 8192 KiB may be locked" in pinned[0].text
    down = dataclasses.replace(FACTS, interface="ib0", interface_up=False, address="10.0.0.1")
    assert problems(down, Needs(1))[0].text == "interface ib0 of 10.0.0.1 is down"
    files = problems(dataclasses.replace(FACTS, open_files=256), Needs(1))
    assert [finding.standing for finding in files] == [WEAK]


def test_clocks_are_held_against_the_median() -> None:
    ahead = (0.0, 0.01, -5.0, 0.02)
    reports = [report(0)]
    reports += [report(n, Link(0, "", 0.002, -ahead[n])) for n in (1, 2, 3)]
    found = judge(reports, Needs(2))
    assert standings(found) == [GOOD, GOOD, WEAK, GOOD]
    assert "its clock is -5.0 s off" in found[2].text
    assert clocks(reports)[2] == (-5.0, 0.001)


def rated(peer: int, rate: float) -> Link:
    return Link(peer, "", 1e-4, 0.0, rate)


def test_a_slow_link_makes_its_weak_end_a_spare() -> None:
    reports = [
        report(0, rated(1, 4e8)),
        report(1, rated(0, 4e8), rated(2, 1e9)),
        report(2, rated(1, 1e9), rated(3, 1e9)),
        report(3, rated(2, 1e9)),
    ]
    found = judge(reports, Needs(2))
    assert standings(found) == [WEAK, GOOD, GOOD, GOOD]
    assert "its link carries 0.40 GB/s, the median is 1.00 GB/s" in found[0].text


def test_each_direction_counts_at_its_best() -> None:
    reports = [
        report(0, rated(1, 2e8), rated(2, 1e9)),
        report(1, rated(0, 1e9)),
        report(2, rated(0, 3e8)),
    ]
    assert speeds(reports) == {0: Speed(1e9, 1e9), 1: Speed(2e8, 1e9), 2: Speed(1e9, 3e8)}
    assert speeds([report(0), report(1, rated(0, 1e9))]) == {0: None, 1: None}


def test_the_node_behind_broken_links_is_left_out_not_its_peers() -> None:
    reports = [report(0, *broken(2)), report(1, *broken(2)), report(2), report(3)]
    found = judge(reports, Needs(3))
    assert standings(found) == [GOOD, GOOD, LEFT_OUT, GOOD]
    assert "no connection with 2 of 3 nodes, one is node 0 (no answer" in found[2].text


def test_a_node_that_is_out_anyway_breaks_no_links() -> None:
    odd = report(0, *broken(1, 2), versions={})
    assert standings(judge([odd, report(1), report(2)], Needs(2))) == [LEFT_OUT, GOOD, GOOD]


@st.composite
def clusters(draw: st.DrawFn) -> list[NodeReport]:
    total = draw(st.integers(1, 9))
    reports = []
    for node in range(total):
        if draw(st.integers(0, 9)) == 0:
            reports.append(NodeReport(node))
            continue
        links = []
        for peer in range(total):
            if peer != node:
                error = draw(st.sampled_from(["", "", "", "", "why"]))
                rate = draw(st.sampled_from([None, 1e9, 1e9, 1.1e9, 4e8]))
                clock = draw(st.sampled_from([0.0, 0.0, 9.0]))
                links.append(Link(peer, error, 0.001, clock, None if error else rate))
        reports.append(
            report(
                node,
                *links,
                shm_free_bytes=draw(st.sampled_from([10**12, 10**12, 10**8])),
                versions={"torch": draw(st.sampled_from(["1", "1", "1", "2"]))},
            )
        )
    return reports


@given(clusters(), st.randoms(use_true_random=False))
def test_what_holds_for_any_facts(reports: list[NodeReport], shuffler: random.Random) -> None:
    needs = Needs(1, shm_bytes=10**9)
    found = judge(reports, needs)
    assert sorted(found) == [each.node for each in reports]
    for one in found.values():
        assert bool(one.reasons) == (one.standing is not GOOD)
    # Whoever takes part reaches all others that do.
    taking_part = {node for node, one in found.items() if one.standing is not LEFT_OUT}
    for each in reports:
        if each.node in taking_part:
            assert not taking_part & {link.peer for link in each.links if link.error}
    known = [r.facts for r in reports if r.facts is not None and r.node in taking_part]
    assert len({facts.versions["torch"] for facts in known}) <= 1
    # Reports come in any order.
    shuffler.shuffle(reports)
    assert judge(reports, needs) == found


@given(st.sets(st.integers(0, 60), max_size=40))
def test_a_node_is_measured_once_in_a_round(nodes: set[int]) -> None:
    pairs = first_pairs(nodes)
    for node in nodes:
        partners = {other for pair in pairs if node in pair for other in pair} - {node}
        assert len(partners) >= min(2, len(nodes) - 1)
    assert sorted(pair for turn in rounds(pairs) for pair in turn) == pairs
    for turn in rounds(pairs):
        assert len({node for pair in turn for node in pair}) == 2 * len(turn)
    assert len(rounds(pairs)) <= 7
