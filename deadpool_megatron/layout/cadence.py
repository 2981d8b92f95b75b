"""The cadence: only generations of every n-th iteration are protected. Pure arithmetic.

Which iterations those are follows from their number alone, so that all roles protect the same ones:
if a role skipped one on its own account, no later failure would find a state that all roles have.
Slots and lag count protected generations. Why the gate of the design (section 4) still holds is
written in :mod:`deadpool_megatron.hooks.capture.protection`.
"""

from __future__ import annotations

from collections.abc import Callable

from deadpool_megatron.layout.records import EpochRecord, Generation


def is_due(iteration: int, every: int) -> bool:
    """Return whether the generation of ``iteration`` is protected."""
    return iteration % every == 0


def next_due(iteration: int, every: int) -> int:
    """The first protected iteration that is not before ``iteration``."""
    return -(-iteration // every) * every


def successors(generation: Generation, restored: Generation, newest: Generation, every: int) -> int:
    """Return how many generations after ``generation`` a role has certainly written by ``newest``.

    ``restored``: what the epoch of ``newest`` began with; from there on every due iteration was
    written. How many lie between an older generation and ``restored`` is not known here, for the
    cadence may have been another one: only ``restored`` itself is counted.
    """
    begin = max(generation.iteration, restored.iteration)
    since = max(0, newest.iteration // every - begin // every)
    return since + (generation < restored)


def successors_by(record: EpochRecord, newest: Generation) -> Callable[[Generation], int]:
    """:func:`successors` in the epoch of ``record``, of which ``newest`` is sealed somewhere."""
    restored, every = record.restore.generation, record.protection.every
    return lambda generation: successors(generation, restored, newest, every)


def most_lost(every: int, max_lag: int, *, spans_the_world: bool) -> int:
    """The most finished iterations that one failure makes a job compute again.

    The update of a due iteration p passes its gate when the generation ``max_lag`` + 1 due ones
    before p is committed. Just before that the resume point is one more before it, and p - 1 is the
    newest finished iteration. ``spans_the_world``: a collective keeps all roles at their gates
    together; without it some role may have finished p already.
    """
    return (2 + max_lag) * every - (1 if spans_the_world else 0)
