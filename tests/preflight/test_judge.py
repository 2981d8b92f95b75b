"""The verdict as a function of facts: every rule, and what holds for any facts."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from deadpool_megatron.preflight.facts import Clock, Missing, NodeFacts, NodeReport, Rate, Wanted
from deadpool_megatron.preflight.judge import Standing, Verdict, judge, problems, racks_together

FACTS = NodeFacts(
    hostname="",
    versions={"torch": "2.13.0", "python": "3.11.7"},
    shm_bytes=10**12,
    shm_free_bytes=10**12,
    memory_bytes=10**12,
    open_files=20000,
)
GOOD, SPARE, LEFT_OUT = Standing.GOOD, Standing.SPARE, Standing.LEFT_OUT


def report(
    node: int,
    rate: float | None = 1e9,
    clock: Clock | None = None,
    unreached: Mapping[int, str] | None = None,
    **facts: Any,
) -> NodeReport:
    rates = () if rate is None else (Rate(99, rate, rate, 1e-4),)
    own = dataclasses.replace(FACTS, **{"hostname": f"host{node}", **facts})
    return NodeReport(node, own, clock, unreached or {}, rates)


def standings(verdict: Verdict) -> list[Standing]:
    return [entry.standing for entry in verdict.nodes]


def reason(verdict: Verdict, node: int) -> str:
    return "; ".join(verdict.nodes[node].reasons)


def test_the_majority_of_versions_is_right() -> None:
    odd = {"torch": "2.12.0", "python": "3.11.7"}
    verdict = judge([report(0, versions=odd), report(1), report(2)], [], Wanted(2))
    assert standings(verdict) == [LEFT_OUT, GOOD, GOOD]
    assert "torch is 2.12.0, on most nodes it is 2.13.0" in reason(verdict, 0)


def test_a_component_that_only_one_node_has_or_lacks() -> None:
    more = {**FACTS.versions, "transformer-engine": "2.0"}
    verdict = judge([report(0), report(1), report(2, versions=more)], [], Wanted(2))
    assert "transformer-engine is 2.0, on most nodes it is not there" in reason(verdict, 2)
    few = judge([report(0, versions={}), report(1), report(2)], [], Wanted(2))
    assert "torch is not there, on most nodes it is 2.13.0" in reason(few, 0)


def test_gpus_count_where_any_node_has_them() -> None:
    wanted = Wanted(2, nproc_per_node=8)
    assert judge([report(0), report(1)], [], wanted).ok
    verdict = judge([report(0, gpus=8), report(1, gpus=7), report(2, gpus=0)], [], wanted)
    assert standings(verdict) == [GOOD, LEFT_OUT, LEFT_OUT]
    assert "7 GPUs, --nproc-per-node is 8" in reason(verdict, 1)


def test_limits_of_a_node() -> None:
    wanted = Wanted(1, shm_bytes=50 * 10**9)
    low = dataclasses.replace(FACTS, shm_free_bytes=10**9, memory_bytes=10**9)
    assert [finding.standing for finding in problems(low, wanted)] == [LEFT_OUT, LEFT_OUT]
    container = dataclasses.replace(FACTS, shm_bytes=64 << 20, shm_free_bytes=64 << 20)
    assert "as containers get by default" in problems(container, Wanted(1))[0].text
    locked = dataclasses.replace(FACTS, memlock_bytes=8 << 20)
    assert problems(locked, wanted) == []  # nothing is pinned without a GPU
    pinned = problems(dataclasses.replace(locked, gpus=8), wanted)
    assert [finding.standing for finding in pinned] == [SPARE]
    assert "only 8192 KiB may be locked" in pinned[0].text
    down = dataclasses.replace(FACTS, interface="ib0", interface_up=False, address="10.0.0.1")
    assert problems(down, Wanted(1))[0].text == "interface ib0 of 10.0.0.1 is down"
    files = problems(dataclasses.replace(FACTS, open_files=256), Wanted(1))
    assert [finding.standing for finding in files] == [SPARE]


def test_slow_links_and_clocks_make_spares() -> None:
    clocks = [Clock(offset, 0.001) for offset in (0.0, 0.01, -5.0, 0.02)]
    reports = [report(node, clock=clock) for node, clock in enumerate(clocks)]
    reports[0] = report(0, rate=4e8, clock=clocks[0])
    verdict = judge(reports, [], Wanted(2, 2))
    assert standings(verdict) == [SPARE, GOOD, SPARE, GOOD]
    assert [entry.assigned for entry in verdict.nodes] == [2, 0, 3, 1]
    assert "its link carries 0.40 GB/s, the median is 1.00 GB/s" in reason(verdict, 0)
    assert "its clock is -5.0 s off" in reason(verdict, 2)


def test_a_clock_is_not_blamed_for_what_the_exchange_cannot_tell() -> None:
    unsure = [report(0, clock=Clock(0.0, 0.001)), report(1, clock=Clock(0.002, 0.001))]
    unsure.append(report(2, clock=Clock(3.0, 2.5)))
    assert judge(unsure, [], Wanted(3)).ok


def test_each_direction_counts_at_its_best() -> None:
    rates = (Rate(1, 1e9, 2e8, 1e-4), Rate(2, 3e8, 1e9, 1e-4))
    assert NodeReport(0, FACTS, rates=rates).rate_bytes_per_second == 1e9
    assert NodeReport(0, FACTS).rate_bytes_per_second is None
    assert rates[0].seen_by_peer(7) == Rate(7, 2e8, 1e9, 1e-4)


def test_the_node_behind_broken_links_is_left_out_not_its_peers() -> None:
    reports = [report(node, unreached={2: "no answer in time"}) for node in (0, 1)]
    reports += [report(2), report(3)]
    verdict = judge(reports, [], Wanted(3))
    assert standings(verdict) == [GOOD, GOOD, LEFT_OUT, GOOD]
    assert "no connection with 2 of 3 nodes, one is node 0 (no answer" in reason(verdict, 2)


def test_a_node_that_is_out_anyway_breaks_no_links() -> None:
    odd = report(0, versions={}, unreached={1: "no answer", 2: "no answer"})
    assert standings(judge([odd, report(1), report(2)], [], Wanted(2))) == [LEFT_OUT, GOOD, GOOD]


def test_racks_stay_together() -> None:
    racks = ["a", "b", "a", "", "b"]
    reports = [report(node, domain=rack) for node, rack in enumerate(racks)]
    verdict = judge(reports, [], Wanted(4, 1))
    assert [entry.assigned for entry in verdict.nodes] == [0, 2, 1, 4, 3]


def test_too_few_good_nodes_and_what_to_do() -> None:
    verdict = judge([report(0)], [Missing(1, "it did not come", "host1")], Wanted(2))
    assert not verdict.ok
    assert verdict.nodes[1].reasons == ("it did not come",)
    assert verdict.advice.startswith("1 good nodes, --nodes is 2: mend")
    assert "--exclude=host1" in verdict.advice


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[NodeReport], list[Missing], Wanted]:
    total = draw(st.integers(1, 9))
    wanted = Wanted(draw(st.integers(1, total)), shm_bytes=10**9)
    reports, missing = [], []
    for node in range(total):
        if draw(st.integers(0, 9)) == 0:
            missing.append(Missing(node, "it did not come"))
            continue
        others = st.integers(0, total - 1).filter(lambda other, node=node: other != node)
        reports.append(
            report(
                node,
                rate=draw(st.sampled_from([None, 1e9, 1e9, 1.1e9, 4e8])),
                clock=draw(st.sampled_from([None, Clock(0.0, 0.001), Clock(9.0, 0.001)])),
                unreached=draw(st.dictionaries(others, st.just("why"), max_size=2))
                if total > 1
                else {},
                domain=draw(st.sampled_from(["", "a", "b"])),
                shm_free_bytes=draw(st.sampled_from([10**12, 10**12, 10**8])),
                versions={"torch": draw(st.sampled_from(["1", "1", "1", "2"]))},
            )
        )
    return reports, missing, wanted


@given(clusters(), st.randoms(use_true_random=False))
def test_what_holds_for_any_facts(
    cluster: tuple[list[NodeReport], list[Missing], Wanted], shuffler: random.Random
) -> None:
    reports, missing, wanted = cluster
    verdict = judge(reports, missing, wanted)
    entries = {entry.node: entry for entry in verdict.nodes}
    by_node = {each.node: each for each in reports}
    good = [entry for entry in verdict.nodes if entry.standing is GOOD]

    assert sorted(entries) == sorted([*by_node, *(absent.node for absent in missing)])
    assert verdict.ok == (len(good) >= wanted.nodes)
    assert bool(verdict.advice) != verdict.ok
    for entry in verdict.nodes:
        assert (entry.assigned is None) == (entry.standing is LEFT_OUT)
        assert bool(entry.reasons) == (entry.standing is not GOOD)
    # The ids are 0, 1, 2, ...; no weak node is before a good one.
    used = sorted((e for e in verdict.nodes if e.assigned is not None), key=lambda e: e.assigned)
    assert [entry.assigned for entry in used] == list(range(len(used)))
    assert used[: len(good)] == sorted(good, key=lambda entry: entry.assigned or 0)
    # Whoever takes part reaches all others that do.
    taking_part = {entry.node for entry in used}
    assert all(not taking_part & by_node[node].unreached.keys() for node in taking_part)
    assert len({by_node[node].facts.versions["torch"] for node in taking_part}) <= 1
    # Racks of good nodes are not interleaved.
    racks = [by_node[e.node].facts.domain or f"node{e.node}" for e in used[: len(good)]]
    assert len(list(dict.fromkeys(racks))) == sum(
        1 for place, rack in enumerate(racks) if place == 0 or racks[place - 1] != rack
    )
    # Whoever conducts gets its answers in another order.
    shuffler.shuffle(reports)
    shuffler.shuffle(missing)
    assert judge(reports, missing, wanted) == verdict


def test_racks_in_the_order_of_their_first_node() -> None:
    reports = [report(node, domain=rack) for node, rack in enumerate("baab")]
    assert [each.node for each in racks_together(reports[::-1])] == [0, 3, 1, 2]
