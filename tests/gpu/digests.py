"""The state that a hash is of, piece by piece."""

from deadpool_megatron.megatron import identity
from deadpool_megatron.member.loop import ProtectedLoop
from deadpool_megatron.state.digest import state_digest


def state_digests(loop: ProtectedLoop) -> dict[str, str]:
    """Name -> SHA-256: shows where two states differ."""
    return {entry[0]: state_digest([entry]) for entry in identity.state_entries(loop)}
