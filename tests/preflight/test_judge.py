"""The judgement as a function of facts: every rule."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from hypothesis import given, strategies as st

from deadpool_megatron.preflight.judge import HostFacts, Judgement, Needs, Standing, judge, problems

FACTS = HostFacts(
    hostname="",
    versions={"torch": "2.13.0", "python": "3.11.7"},
    shm_bytes=10**12,
    shm_free_bytes=10**12,
    memory_bytes=10**12,
    open_files=20000,
)
NEEDS = Needs(2)
GOOD, WEAK, LEFT_OUT = Standing.GOOD, Standing.WEAK, Standing.LEFT_OUT


def of(**facts: Any) -> HostFacts:
    return dataclasses.replace(FACTS, **facts)


def judged(*facts: HostFacts | None, needs: Needs = NEEDS) -> dict[int, Judgement]:
    return judge(dict(enumerate(facts)), needs)


def standings(found: Mapping[int, Judgement]) -> list[Standing]:
    return [one.standing for _, one in sorted(found.items())]


def test_the_majority_of_versions_is_right() -> None:
    odd = {"torch": "2.12.0", "python": "3.11.7"}
    found = judged(of(versions=odd), FACTS, FACTS)
    assert standings(found) == [LEFT_OUT, GOOD, GOOD]
    assert "torch is 2.12.0, on most nodes it is 2.13.0" in found[0].text


def test_a_component_that_only_one_node_has_or_lacks() -> None:
    more = {**FACTS.versions, "transformer-engine": "2.0"}
    found = judged(FACTS, FACTS, of(versions=more))
    assert "transformer-engine is 2.0, on most nodes it is not there" in found[2].text
    few = judged(of(versions={}), FACTS, FACTS)
    assert "torch is not there, on most nodes it is 2.13.0" in few[0].text


def test_another_driver_makes_a_node_weak_only() -> None:
    drivers = [{**FACTS.versions, "nvidia driver": text} for text in ("570", "570", "560")]
    assert standings(judged(*(of(versions=v) for v in drivers))) == [GOOD, GOOD, WEAK]


def test_a_node_that_says_nothing_is_not_blamed() -> None:
    found = judged(FACTS, None, FACTS, needs=Needs(3, shm_bytes=10**9))
    assert standings(found) == [GOOD, GOOD, GOOD]


def test_gpus_count_where_any_node_has_them() -> None:
    needs = Needs(2, gpus_per_node=8)
    assert standings(judged(FACTS, FACTS, needs=needs)) == [GOOD, GOOD]
    found = judged(of(gpus=8), of(gpus=7), FACTS, needs=needs)
    assert standings(found) == [GOOD, LEFT_OUT, LEFT_OUT]
    assert "7 GPUs, --nproc-per-node is 8" in found[1].text
    found = judged(of(gpus=8), of(gpus=1), needs=Needs(2, gpus_per_node=0))
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
    assert list(problems(locked, needs)) == []  # nothing is pinned without a GPU
    pinned = list(problems(dataclasses.replace(locked, gpus=8), needs))
    assert [finding.standing for finding in pinned] == [WEAK]
    assert "only 8192 KiB may be locked" in pinned[0].text
    down = dataclasses.replace(FACTS, interface="ib0", interface_up=False, address="10.0.0.1")
    assert next(problems(down, Needs(1))).text == "interface ib0 of 10.0.0.1 is down"
    files = list(problems(dataclasses.replace(FACTS, open_files=256), Needs(1)))
    assert [finding.standing for finding in files] == [WEAK]


@given(
    st.lists(
        st.none()
        | st.builds(
            of,
            shm_free_bytes=st.sampled_from([10**12, 10**12, 10**8]),
            versions=st.sampled_from(["1", "1", "1", "2"]).map(lambda torch: {"torch": torch}),
        ),
        min_size=1,
        max_size=9,
    )
)
def test_what_holds_for_any_facts(facts: list[HostFacts | None]) -> None:
    needs = Needs(1, shm_bytes=10**9)
    found = judged(*facts, needs=needs)
    assert list(found) == list(range(len(facts)))
    for one in found.values():
        assert bool(one.reasons) == (one.standing is not GOOD)
    kept = [one for node, one in enumerate(facts) if found[node].standing is not LEFT_OUT]
    assert len({one.versions["torch"] for one in kept if one is not None}) <= 1
    assert judge(dict(reversed(list(enumerate(facts)))), needs) == found, "they come in any order"
