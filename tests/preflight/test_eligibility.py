"""Eligibility as a function of facts, whatever they are; each rule is in calls/eligibility.txt."""

from hypothesis import given, strategies as st

from deadpool_megatron.preflight.eligibility import Eligibility, HostFacts, Needs, judge

FACTS = st.builds(
    HostFacts,
    st.just(""),
    shm_bytes=st.just(10**12),
    memory_bytes=st.just(10**12),
    shm_free_bytes=st.sampled_from([10**12, 10**12, 10**8]),
    versions=st.sampled_from(["1", "1", "1", "2"]).map(lambda torch: {"torch": torch}),
)


@given(st.lists(st.none() | FACTS, min_size=1, max_size=9))
def test_judgement_is_consistent_for_any_facts(facts):
    needs = Needs(1, shm_bytes=10**9)
    found = judge(dict(enumerate(facts)), needs)
    assert list(found) == list(range(len(facts)))
    for one in found.values():
        assert bool(one.reasons) == (one.eligibility is not Eligibility.GOOD)
    out = Eligibility.EXCLUDED
    kept = [one for node, one in enumerate(facts) if found[node].eligibility is not out]
    assert len({one.versions["torch"] for one in kept if one is not None}) <= 1
    assert judge(dict(reversed(list(enumerate(facts)))), needs) == found, "they come in any order"
