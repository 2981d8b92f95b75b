"""Digests of the entries of a state."""

from deadpool_megatron.megatron import identity
from deadpool_megatron.member.loop import ProtectedLoop
from deadpool_megatron.state.digest import state_digest


def state_digests(loop: ProtectedLoop) -> dict[str, str]:
    """Return name -> SHA-256 of each entry, to show where two states differ."""
    return {entry[0]: state_digest([entry]) for entry in identity.state_entries(loop)}
