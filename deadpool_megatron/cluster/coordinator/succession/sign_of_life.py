"""The coordinator's sign of life in the journal, and its look for a newer term."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from deadpool_megatron.cluster.journal.journal import Journal, JournalError
from deadpool_megatron.cluster.journal.terms import Rhythm, has_begun_after, newest_term, sign


class SignOfLife:
    """Writes the sign and looks, in a thread of its own: a network file system may hang. Nothing
    else is done in that thread, so that nothing but the journal itself can hold the sign up.

    ``is_heard()``: whether enough agents are heard. A coordinator that is cut off from most agents
    withholds its sign: else they would all fence themselves, and nobody would take over.
    ``on_gap()``: the sign stood still for so long that standbys and agents may have taken the
    coordinator for gone.
    ``on_newer(term)``: another one has taken over. ``on_trouble(text)``: the journal cannot be
    reached; once for each text.
    """

    def __init__(
        self,
        journal: Journal,
        term: int,
        rhythm: Rhythm,
        is_heard: Callable[[], bool],
        on_gap: Callable[[], None],
        on_newer: Callable[[int], None],
        on_trouble: Callable[[str], None],
    ) -> None:
        self._journal = journal
        self._term = term
        self._rhythm = rhythm
        self._is_heard = is_heard
        self._on_gap = on_gap
        self._on_newer = on_newer
        self._on_trouble = on_trouble
        self._count = 0
        self._written_at = time.monotonic()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sign-of-life")

    def is_fresh(self, now: float) -> bool:
        """Return whether readers have seen the sign move all the time: only then may a silence
        count."""
        return now - self._written_at <= self._rhythm.gap

    async def run(self) -> None:
        """Until cancelled, or until another one has taken over."""
        loop = asyncio.get_running_loop()
        known = ""
        while True:
            show = self._is_heard()
            trouble = "" if show else "more than half of the agents are silent at once"
            try:
                is_followed = await loop.run_in_executor(self._thread, self._once, show)
            except (JournalError, OSError) as error:
                trouble = str(error)
            else:
                if show:
                    self._shown(time.monotonic())
                if is_followed:
                    self._on_newer(self._term + 1)
                    return  # whatever else was found says nothing more
            if trouble and trouble != known:
                self._on_trouble(trouble)
            known = trouble
            await asyncio.sleep(self._rhythm.beat)

    def _shown(self, now: float) -> None:
        if not self.is_fresh(now):
            self._on_gap()
        self._written_at = now

    def look(self) -> int:
        """The newest term, from a list of all, asked right now from the calling thread: for what no
        other coordinator may do as well. Raises JournalError.
        """
        found = newest_term(self._journal)
        return self._term if found is None else found.number

    def close(self) -> None:
        """Stop the thread, without waiting for a look that hangs."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _once(self, show: bool) -> bool:
        """Returns whether a newer term has begun; else the sign moves, if it is to be shown."""
        self._count += 1
        is_followed = has_begun_after(self._journal, self._term)
        if show and not is_followed:
            self._journal.beat(sign(self._term, self._count))
        return is_followed
