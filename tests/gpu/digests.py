"""The state that a hash is of, piece by piece."""

import hashlib

from deadpool_megatron.megatron import identity
from deadpool_megatron.member.loop import ProtectedLoop


def state_digests(loop: ProtectedLoop) -> dict[str, str]:
    """Name -> SHA-256: shows where two states differ."""
    digests = {}
    for name, value in identity._entries(loop):
        digest = hashlib.sha256()
        identity._add(digest, name, value)
        digests[name] = digest.hexdigest()
    return digests
