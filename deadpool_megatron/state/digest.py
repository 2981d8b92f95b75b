"""Digests of training state: full digests, by which runs are compared, and short digests that
locate a difference."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from deadpool_megatron.state.parts import flat_bytes

#: a name, and a tensor or text
Entry = tuple[str, Tensor | str]


def state_digest(entries: Iterable[Entry]) -> str:
    """Return the SHA-256 of entries, in hexadecimal."""
    digest = hashlib.sha256()
    for name, value in entries:
        _add(digest, name, value)
    return digest.hexdigest()


def short_digests(entries: Iterable[Entry]) -> dict[str, str]:
    """Return a short digest of each entry by its name."""
    return {name: state_digest([(name, value)])[:12] for name, value in entries}


def generator_entries() -> Iterator[Entry]:
    """Yield the random states of Python, numpy and torch."""
    kind, keys, position, has_normal, normal = np.random.get_state(legacy=True)
    yield "rng.python", repr(random.getstate())
    yield "rng.numpy", f"{kind}{np.asarray(keys).tobytes().hex()}{position}{has_normal}{normal}"
    yield "rng.torch", torch.get_rng_state()
    if torch.cuda.is_available():
        yield "rng.cuda", torch.cuda.get_rng_state()


def _add(digest: hashlib._Hash, name: str, value: Tensor | str) -> None:
    digest.update(name.encode())
    if isinstance(value, str):
        digest.update(value.encode())
        return
    digest.update(f"{tuple(value.shape)}{value.dtype}".encode())
    digest.update(flat_bytes(value).cpu().numpy().data)
