"""Who is wrong, by the results of peers; when they are compared, and how those travel."""

from collections.abc import Collection
from itertools import pairwise

import pytest
import torch
from hypothesis import given, strategies as st

from deadpool_megatron.hooks.audit.audit import audit_number, is_audited
from deadpool_megatron.hooks.audit.shipping import chunk_bytes, describe, described, pack, unpack
from deadpool_megatron.hooks.audit.verdict import (
    Accusation,
    Pass,
    alone,
    comparable,
    hardware,
    judge_equals,
    judge_passes,
    judge_repeated,
    judge_repeated_passes,
    judge_update,
    unrepeatable,
)
from deadpool_megatron.hooks.capture.update_replay import update_copies
from deadpool_megatron.layout.records import is_due
from tests.hooks.capture.test_update_replay import FLAGS, Rig

RIGHT, WRONG, OTHER = (1, 2), (1, 3), (9, 9)
ALIKE = dict.fromkeys(range(40), 7)
CPU = torch.device("cpu")


def test_without_a_majority_all_are_in_doubt() -> None:
    assert judge_equals({3: RIGHT, 1: WRONG}, "w") == Accusation((1, 3), False, "w")
    halves = {0: RIGHT, 1: WRONG, 2: RIGHT, 3: WRONG}
    assert judge_equals(halves, "w") == Accusation((0, 1, 2, 3), False, "w")


def test_who_gets_two_results_for_one_update_is_wrong_by_its_own_word() -> None:
    assert judge_update(1, WRONG, {0: RIGHT, 1: RIGHT}, ALIKE, "u") == Accusation((1,), True, "u")
    assert judge_update(1, RIGHT, {0: RIGHT, 1: WRONG}, ALIKE, "u") == Accusation((1,), True, "u")


def test_an_update_is_right_as_most_compute_it() -> None:
    assert judge_update(1, RIGHT, {0: RIGHT, 1: RIGHT, 2: RIGHT}, ALIKE, "u") is None
    again = {0: RIGHT, 1: WRONG, 2: RIGHT}
    assert judge_update(1, WRONG, again, ALIKE, "u") == Accusation((1,), True, "u")
    again = {0: WRONG, 1: RIGHT, 2: RIGHT}
    assert judge_update(1, RIGHT, again, ALIKE, "u") == Accusation((0,), True, "u")
    assert judge_update(1, OTHER, again, ALIKE, "u") == Accusation((0, 1), True, "u")
    assert judge_update(1, WRONG, {0: RIGHT, 1: WRONG}, ALIKE, "u") == Accusation(
        (0, 1), False, "u"
    )


@given(st.integers(3, 40), st.data())
def test_a_minority_is_named_and_nobody_else(peers: int, data: st.DataObject) -> None:
    wrong = data.draw(st.sets(st.integers(0, peers - 1), max_size=(peers - 1) // 2))
    held = {role: (5, role) if role in wrong else RIGHT for role in range(peers)}
    found = judge_equals(held, "weights")
    assert (found is None) == (not wrong)
    if found is not None:
        assert found.is_certain
        assert set(found.roles) == wrong


# Three replicas of two stages, each of two roles that share the work (tensor parallelism).


def passes(
    wrong: dict[int, str], replicas: int = 3, other_hardware: Collection[int] = ()
) -> dict[int, Pass]:
    """Role = 4 x replica + 2 x stage + tensor rank. ``wrong``: role -> which of o, r, g are."""
    found = {}
    for replica in range(replicas):
        for place in range(4):
            role = 4 * replica + place
            sums = [WRONG if kind in wrong.get(role, "") else RIGHT for kind in "org"]
            found[role] = Pass(replica, place // 2, place, *sums, int(role in other_hardware))
    return found


def test_equal_passes_are_no_verdict() -> None:
    assert judge_passes(passes({})) is None


def test_a_wrong_forward_pass_is_that_of_the_first_stage_with_a_wrong_output() -> None:
    everywhere = dict.fromkeys(range(4, 8), "org")
    found = judge_passes(passes(everywhere))
    assert found == Accusation((4, 5), True, "a forward and backward pass")
    later = judge_passes(passes({4: "rg", 5: "rg", 6: "org", 7: "org"}))
    assert later == Accusation((6, 7), True, "a forward and backward pass")


def test_a_wrong_backward_pass_is_that_of_the_last_stage_that_got_the_right_gradient() -> None:
    found = judge_passes(passes({4: "rg", 5: "rg", 6: "g"}))
    assert found == Accusation((6,), True, "a forward and backward pass")
    first = judge_passes(passes({4: "g"}))
    assert first == Accusation((4,), True, "a forward and backward pass")


def test_a_gradient_that_was_wrong_on_the_way_is_of_either_end() -> None:
    found = judge_passes(passes({4: "rg"}))
    assert found == Accusation((4, 5, 6, 7), True, "a forward and backward pass")


def test_two_replicas_that_differ_leave_both_first_roles_in_doubt() -> None:
    found = judge_passes(passes({4: "org", 5: "org", 6: "org", 7: "org"}, replicas=2))
    assert found == Accusation((0, 1, 4, 5), False, "a forward and backward pass")


def repeats(*odd: int, stages: int = 4, replicas: int = 3) -> dict[int, tuple[int, bool]]:
    """Role = stages x replica + stage."""
    return {role: (role % stages, role not in odd) for role in range(stages * replicas)}


def test_a_stage_that_does_not_repeat_is_enough_however_many_others_do() -> None:
    assert unrepeatable(repeats(3, 7, 11)) == [3, 7, 11]
    assert unrepeatable(repeats(3, 7)) == [3, 7], "who is odd there need not be wrong"
    assert unrepeatable(repeats(3, replicas=2)) == [3], "of two, one is no majority"


# Mixed hardware: other bytes are no sign of anything there.


def test_an_odd_update_on_other_hardware_is_no_verdict() -> None:
    """Neither of the one that is audited, nor of a peer."""
    again = {0: RIGHT, 1: OTHER, 2: RIGHT}
    assert judge_update(1, OTHER, again, {0: 7, 1: 8, 2: 7}, "u") is None
    assert judge_update(0, RIGHT, again, {0: 7, 1: 8, 2: 7}, "u") is None
    assert judge_update(1, WRONG, again, {0: 7, 1: 8, 2: 7}, "u") == Accusation((1,), True, "u")


def test_a_replica_is_judged_by_those_that_have_its_hardware_in_every_stage() -> None:
    """The pass of replica 1 goes through another device in its second stage."""
    everything = dict.fromkeys((4, 5), "rg") | dict.fromkeys((6, 7), "org")
    assert judge_passes(passes(everything, other_hardware=[6])) is None
    assert judge_passes(passes(everything)) is not None
    keys = comparable(passes({}, other_hardware=[6]))
    assert alone(keys) == [4, 5, 6, 7]
    assert alone(comparable(passes({}, other_hardware=[6, 10]))) == [0, 1, 2, 3]


def test_what_does_not_repeat_on_some_hardware_is_not_relied_on() -> None:
    """They are few of all, and all of their kind."""
    found = {role: (("place", role in (3, 4)), role not in (3, 4)) for role in range(5)}
    assert unrepeatable(found) == [3, 4]


# No majority: all compute it once more.


def test_who_does_not_repeat_itself_is_wrong() -> None:
    first = {0: RIGHT, 1: WRONG}
    assert judge_repeated(first, {0: RIGHT, 1: RIGHT}, "u") == Accusation((1,), True, "u")
    assert judge_repeated(first, {0: RIGHT, 1: OTHER}, "u") == Accusation((1,), True, "u")
    assert judge_repeated(first, first, "u") is None, "both are as sure as before"
    assert judge_repeated(first, {0: OTHER, 1: RIGHT}, "u") is None


def test_a_pass_that_was_wrong_once_is_that_of_the_stage_where_it_began() -> None:
    once = passes({4: "rg", 5: "rg", 6: "org"}, replicas=2)
    right = passes({}, replicas=2)
    found = Accusation((6,), True, "a forward and backward pass")
    assert judge_repeated_passes(once, right) == found
    assert judge_repeated_passes(right, once) == found, "whichever of the two it was"
    assert judge_repeated_passes(once, once) is None
    assert judge_repeated_passes(once, passes({0: "g"}, replicas=2)) is None, "neither is sure"


@given(st.data())
def test_a_flip_in_one_of_two_replicas_never_names_the_other(data: st.DataObject) -> None:
    kinds = st.sampled_from(["o", "r", "g", "og", "rg", "org"])
    wrong = data.draw(st.dictionaries(st.integers(4, 7), kinds, min_size=1))
    found = judge_repeated_passes(passes(wrong, replicas=2), passes({}, replicas=2))
    assert found is not None
    assert found.is_certain
    assert set(found.roles) <= {4, 5, 6, 7}


def test_another_one_for_other_kernels_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    before = hardware(CPU)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "NONE")
    other = hardware(CPU)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert len({before, other, hardware(CPU)}) == 3


@given(st.integers(1, 50), st.integers(1, 20))
def test_one_in_each_interval_that_has_a_captured_state(interval: int, every: int) -> None:
    audited = [k for k in range(1, 1000) if is_audited(k, interval, every)]
    assert all(is_due(k - 1, every) for k in audited)
    reached = {k // interval for k in audited}
    wanted = {k // interval for k in range(interval, 1000 - interval - every)}
    assert len(reached) == len(audited), "once in each interval"
    if every <= interval:
        assert wanted <= reached


@given(st.integers(1, 50), st.integers(1, 20))
def test_roles_take_turns_none_is_left_out(interval: int, every: int) -> None:
    audited = [k for k in range(1, 1000) if is_audited(k, interval, every)]
    numbers = [audit_number(k, interval, every) for k in audited]
    assert [later - one for one, later in pairwise(numbers)] == [1] * (len(numbers) - 1)


@pytest.mark.parametrize("name", FLAGS)
def test_a_peer_gets_the_same_bytes(name: str) -> None:
    owner, peer = Rig(*FLAGS[name]), Rig(*FLAGS[name])
    for rig in (peer, owner):
        rig.update(5e-3)
    with torch.no_grad():  # what the peer has must not matter
        for parameter in peer.parameters:
            parameter.fill_(7.0)
    before = owner.bytes_now()
    for number, parameter in enumerate(owner.parameters):
        parameter.grad = None if number == 1 else torch.randn(parameter.shape)
    description = described(describe(owner.inner))
    with torch.no_grad():  # as captured, not as it is
        for parameter in owner.parameters:
            parameter.add_(1.0)
    shipped = [
        pack(owner.inner, chunk, lambda tensor: owner.part.slice(before, tensor), CPU)
        for chunk in description.chunks
    ]
    with torch.no_grad():
        for parameter in owner.parameters:
            parameter.copy_(owner.part.slice(before, parameter))
    owner.adam.step()
    seen = 0
    for chunk, flat in zip(description.chunks, shipped, strict=True):
        assert flat.numel() == chunk_bytes(chunk)
        copies = unpack(chunk, flat)
        update_copies(peer.inner, description.groups, copies)
        for copy in copies:
            live = owner.parameters[copy.number]
            seen += 1
            assert torch.equal(copy.parameter, live)
            for key, value in copy.state.items():
                assert torch.equal(value, owner.adam.state[live][key])
    assert seen == len(owner.parameters)
    assert all(bool((parameter == 7.0).all()) for parameter in peer.parameters)
