"""Place of a vault on its host's processors: ``vault_cpus`` and ``vault_nice``, no privileges."""

from __future__ import annotations

import os
from collections.abc import Collection

_AUTO = "auto"
# Of the processors that the node's processes may use; the last ones, since what counts from 0 up
# (members that are bound by their slot) is found at the other end.
_AUTO_SHARE = 4


def choose_cpus(text: str, allowed: Collection[int]) -> frozenset[int] | None:
    """Return what ``--deadpool-set vault-cpus`` means on a host; None: wherever the kernel likes.

    ``allowed``: processors that this process may use. Raises ValueError, one line, for a list that
    cannot be had.
    """
    if not text:
        return None
    if text == _AUTO:
        ordered = sorted(allowed)
        return frozenset(ordered[-max(1, len(ordered) // _AUTO_SHARE) :])
    wanted: set[int] = set()
    for piece in text.split(","):  # settings let nothing else through than 0-3,8
        first, _, last = piece.partition("-")
        wanted.update(numbers := range(int(first), int(last or first) + 1))
        if not numbers:
            raise ValueError(f"--deadpool-set vault-cpus={text}: {piece} runs backwards")
    if missing := wanted - set(allowed):
        raise ValueError(
            f"--deadpool-set vault-cpus={text}: not among the processors that this node's processes"
            f" may use: {', '.join(map(str, sorted(missing)))}"
        )
    return frozenset(wanted)


def place_process(cpus: str, nice: int) -> None:
    """Put this process in its place; before it starts threads, which inherit it.

    Raises ValueError for processors that cannot be had.
    """
    chosen = choose_cpus(cpus, os.sched_getaffinity(0))
    if chosen is not None:
        os.sched_setaffinity(0, chosen)
    os.nice(nice)
