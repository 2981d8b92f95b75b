"""A peer that has other parameters computes an update of this role to the same bytes."""

from __future__ import annotations

import pytest
import torch

from deadpool_megatron.hooks.audit.shipping import (
    Description,
    Looks,
    chunk_bytes,
    describe,
    pack,
    unpack,
)
from deadpool_megatron.hooks.capture.update_replay import update_copies
from deadpool_megatron.state import extras as codec
from tests.hooks.capture.test_update_replay import FLAGS, Rig

CPU = torch.device("cpu")


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
    payload = codec.encode(describe(owner.inner).to_json())
    description = Description.from_json(codec.decode(payload))
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


def test_a_type_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="nn is no type"):
        Looks.from_json(["nn", [2], True])
