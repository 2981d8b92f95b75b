"""The progress of a run, as people expect it: iterations, samples and tokens per second, goodput,
time left. Pure; fed with the events of a run in their order.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from deadpool_megatron.cluster.coordinator.reporting.accounting import Account
from deadpool_megatron.events import Event, Kind

# Speed is that of so many steps, none of them struck by a failure.
_RECENT_STEPS = 50


class Progress:
    """``account``: the account of the same events, kept by whoever feeds both."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self._newest = 0
        self._iterations: int | None = None
        self._sequence_length: int | None = None
        self._recent = deque[tuple[float, int, int | None]](maxlen=_RECENT_STEPS + 1)

    def add(self, event: Event) -> None:
        """Take in one event. Raises TypeError or ValueError for a damaged one."""
        if event.kind is Kind.TRAINING:
            self._iterations = int(event.data["iterations"])
            length = event.data.get("sequence_length")
            self._sequence_length = None if length is None else int(length)
        elif event.kind is Kind.EPOCH_CLOSED:
            self._recent.clear()  # the next step takes as long as the recovery
        elif event.kind is Kind.EPOCH_DECIDED and "forgotten_from" in event.data:
            self._newest = min(self._newest, int(event.data["forgotten_from"]) - 1)
            self._recent.clear()  # of what was thrown away, some may have come in since the close
        elif event.kind is Kind.STEP and (event.iteration or 0) > self._newest:
            self._newest = int(event.iteration or 0)
            samples = event.data.get("samples")
            known = None if samples is None else int(samples)
            self._recent.append((event.wall_seconds, self._newest, known))

    def to_dict(self) -> dict[str, Any]:
        """Keys: iterations (to train in all), samples_per_second, tokens_per_second, seconds_left;
        None for what is not known.
        """
        step_seconds, speed = self._speed()
        tokens = self._sequence_length
        left = None
        if self._iterations is not None and step_seconds is not None:
            left = max(0, self._iterations - self._newest) * step_seconds
        return {
            "iterations": self._iterations,
            "samples_per_second": speed,
            "tokens_per_second": None if speed is None or tokens is None else speed * tokens,
            "seconds_left": left,
        }

    def words(self, now: float) -> str:
        """``of 100, 12.4 samples/s, 793 tokens/s, goodput 97.1 %, 4.2 min left``, as far as it is
        known at this time (wall clock, seconds)."""
        found, parts = self.to_dict(), []
        if found["iterations"] is not None:
            parts.append(f"of {found['iterations']}")
        if found["samples_per_second"] is not None:
            parts.append(f"{_short(found['samples_per_second'])} samples/s")
        if found["tokens_per_second"] is not None:
            parts.append(f"{_short(found['tokens_per_second'])} tokens/s")
        goodput = self._account.goodput(now)
        if goodput is not None:
            parts.append(f"goodput {100 * goodput:.1f} %")
        if found["seconds_left"] is not None:
            parts.append(f"{_duration(found['seconds_left'])} left")
        return ", ".join(parts)

    def _speed(self) -> tuple[float | None, float | None]:
        """Seconds per iteration, and samples per second."""
        if len(self._recent) < 2:
            return None, None
        (began, first, samples), (ended, last, more) = self._recent[0], self._recent[-1]
        if ended <= began:
            return None, None
        speed = None
        if samples is not None and more is not None:
            speed = (more - samples) / (ended - began)
        return (ended - began) / (last - first), speed


def _duration(value: float) -> str:
    if value >= 5400:
        return f"{value / 3600:.1f} h"
    return f"{value / 60:.1f} min" if value >= 90 else f"{value:.0f} s"


def _short(number: float) -> str:
    for unit in ("", "k", "M"):
        if number < 999.5:  # what is more has four digits
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}G"
