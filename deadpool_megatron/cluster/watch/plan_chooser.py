"""``mixed`` at work: after some iterations, the best plan for what was measured, once in a term
and once after each time that a user has asked for it.

Trying all plans of a large run takes seconds, so it is done in a thread of its own; the coordinator
goes on serving meanwhile and takes the answer when it is there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from deadpool_megatron.cluster.machine.plan_facts import best_plan, budgets_of, scene_of
from deadpool_megatron.cluster.machine.state import State
from deadpool_megatron.cluster.watch.cadence_rule import Stretch
from deadpool_megatron.layout.choice import Choice, Measured
from deadpool_megatron.settings import Settings

MEASURED_ITERATIONS = 20


class PlanChooser:
    """Used from the coordinator's loop only. Chooses once, for as long as ``mixed`` is wanted."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._thread: threading.Thread | None = None
        self._found: list[Choice] = []
        self._is_over = False

    def look(self, state: State, stretch: Stretch) -> Choice | None:
        """The choice, once, when it has been made. Starts to choose when enough was measured.

        ``stretch``: what was seen since the epoch began; ``state``: of a running epoch.
        """
        if not state.mixed:  # a user has chosen; what is being chosen now is for nobody
            self._thread, self._is_over = None, False
            return None
        if self._is_over or state.record is None:
            return None
        if self._thread is None:
            if stretch.iterations >= MEASURED_ITERATIONS:
                self._begin(state, stretch)
            return None
        if self._thread.is_alive():
            return None
        self._is_over = True
        return self._found[0] if self._found else None  # it has said on stderr what went wrong

    def _begin(self, state: State, stretch: Stretch) -> None:
        scene = scene_of(state, self._settings)
        if scene is None:
            return
        assert state.record is not None
        plan = state.record.protection
        measured = None
        if stretch.ship_seconds and stretch.window_seconds:
            # The window of a thinner cadence is that of several iterations.
            window = stretch.window_seconds / plan.every
            measured = Measured(plan, stretch.ship_seconds, window)
        found: list[Choice] = []
        self._found = found
        work = partial(best_plan, scene, budgets_of(state), measured, plan.every)
        # A coordinator that ends does not wait for it.
        self._thread = threading.Thread(target=_choose, args=(work, found), daemon=True)
        self._thread.start()


def _choose(work: Callable[[], Choice], found: list[Choice]) -> None:
    found.append(work())
