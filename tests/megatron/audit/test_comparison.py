"""Which peers are wrong by their results, when they are compared, and how they travel. More is in
tests/megatron/calls/comparison.txt."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, strategies as st

from deadpool_megatron.layout.records import is_due
from deadpool_megatron.megatron.audit import update_transfer as transfer
from deadpool_megatron.megatron.audit.audit import audit_number, is_audited
from deadpool_megatron.megatron.audit.comparison import Pass, compare_held, compare_repeated_passes
from deadpool_megatron.megatron.audit.update_replay import update_copies
from tests.megatron.audit.test_update_replay import FLAGS, Rig

RIGHT, WRONG = (1, 2), (1, 3)
CPU = torch.device("cpu")


@given(st.integers(3, 40), st.data())
def test_only_a_minority_is_named(peers, data):
    wrong = data.draw(st.sets(st.integers(0, peers - 1), max_size=(peers - 1) // 2))
    held = {role: (5, role) if role in wrong else RIGHT for role in range(peers)}
    found = compare_held(held, "weights")
    assert (found is None) == (not wrong)
    if found is not None:
        assert found.is_certain
        assert set(found.roles) == wrong


def passes(wrong: dict[int, str]) -> dict[int, Pass]:
    """Of two replicas of two stages, each of two roles that share the work (tensor parallelism):
    role = 4 x replica + 2 x stage + tensor rank. ``wrong``: role -> which of o, r, g are."""
    found = {}
    for role in range(8):
        sums = [WRONG if kind in wrong.get(role, "") else RIGHT for kind in "org"]
        found[role] = Pass(role // 4, role % 4 // 2, role % 4, *sums)
    return found


@given(st.data())
def test_flip_in_one_of_two_replicas_never_names_the_other(data):
    kinds = st.sampled_from(["o", "r", "g", "og", "rg", "org"])
    wrong = data.draw(st.dictionaries(st.integers(4, 7), kinds, min_size=1))
    found = compare_repeated_passes(passes(wrong), passes({}))
    assert found is not None
    assert found.is_certain
    assert set(found.roles) <= {4, 5, 6, 7}


@given(st.integers(1, 50), st.integers(1, 20))
def test_one_in_each_interval_that_has_a_captured_state(interval, every):
    audited = [k for k in range(1, 1000) if is_audited(k, interval, every)]
    assert all(is_due(k - 1, every) for k in audited)
    reached = {k // interval for k in audited}
    wanted = {k // interval for k in range(interval, 1000 - interval - every)}
    assert len(reached) == len(audited), "once in each interval"
    if every <= interval:
        assert wanted <= reached


@given(st.integers(1, 50), st.integers(1, 20))
def test_roles_take_turns_none_is_left_out(interval, every):
    audited = [k for k in range(1, 1000) if is_audited(k, interval, every)]
    numbers = [audit_number(k, interval, every) for k in audited]
    assert [later - number for number, later in pairwise(numbers)] == [1] * (len(numbers) - 1)


@pytest.mark.parametrize("name", FLAGS)
def test_peer_gets_the_same_bytes(name):
    owner, peer = Rig(*FLAGS[name]), Rig(*FLAGS[name])
    for rig in (peer, owner):
        rig.update(5e-3)
    with torch.no_grad():  # the state of the peer must not matter
        for parameter in peer.parameters:
            parameter.fill_(7.0)
    before = owner.bytes_now()
    for number, parameter in enumerate(owner.parameters):
        parameter.grad = None if number == 1 else torch.randn(parameter.shape)
    description = transfer.parse(transfer.describe(owner.inner))
    with torch.no_grad():  # as captured, not as it is
        for parameter in owner.parameters:
            parameter.add_(1.0)
    shipped = [
        transfer.pack(owner.inner, chunk, lambda tensor: owner.part.slice(before, tensor), CPU)
        for chunk in description.chunks
    ]
    with torch.no_grad():
        for parameter in owner.parameters:
            parameter.copy_(owner.part.slice(before, parameter))
    owner.adam.step()
    seen = 0
    for chunk, flat in zip(description.chunks, shipped, strict=True):
        assert flat.numel() == transfer.chunk_bytes(chunk)
        copies = transfer.unpack(chunk, flat)
        update_copies(peer.inner, description.groups, copies)
        for copy in copies:
            live = owner.parameters[copy.number]
            seen += 1
            assert torch.equal(copy.parameter, live)
            for key, value in copy.state.items():
                assert torch.equal(value, owner.adam.state[live][key])
    assert seen == len(owner.parameters)
    assert all(bool((parameter == 7.0).all()) for parameter in peer.parameters)
