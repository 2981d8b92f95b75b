"""What a training program provides: the seam between any Megatron loop and the hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

# emit(kind, data): kind is the value of an events.Kind, data holds JSON values only.
Emit = Callable[[str, Mapping[str, Any]], None]


class ProtectedLoop(Protocol):
    """A training loop whose state can be captured and put back between any two segments.

    ``counters`` holds at least ``iteration`` (finished iterations) and every other whole number an
    iteration changes; ``log_sums`` running sums of logged values. All state that is neither a
    tensor of model or optimizer, nor the scheduler, nor a random state must be in these two.
    """

    model_chunks: list[Any]
    optimizer: Any
    scheduler: Any
    counters: dict[str, int]
    log_sums: dict[str, float]

    @property
    def done(self) -> bool:
        """True when the last iteration is finished."""

    def train_step(self) -> None:
        """Exactly one iteration, optimizer and scheduler step included."""

    def segments_after(self, iteration: int) -> tuple[str, ...]:
        """Which of ``evaluation`` and ``save`` are due after ``iteration``, in that order."""

    def run_segment(self, name: str) -> None:
        """Run ``evaluation`` (``save`` is done by the session through save_checkpoint)."""

    def reset_after_interrupt(self) -> None:
        """Drop in-flight state and rebuild the data iterators from ``counters``."""

    def save_checkpoint(self, directory: Path) -> None:
        """Collectively write a standard checkpoint into ``directory``."""

    def load_checkpoint(self, directory: Path) -> None:
        """Collectively read one into the live objects."""

    def stage_class(self) -> str:
        """Equal for roles whose model parts have equal shapes."""

    def state_hash(self) -> str:
        """sha256 over parameters, optimizer state, random states, scheduler and counters."""


class Program(Protocol):
    """How to make the loop, again and again, for the role that the environment names."""

    def make_groups(self) -> None:
        """``init_process_group`` and Megatron's groups, for RANK and WORLD_SIZE as they are now."""

    def make_loop(self, emit: Emit) -> ProtectedLoop:
        """Model, optimizer, scheduler and data in the groups just made."""

    def drop_groups(self) -> None:
        """Undo :meth:`make_groups`, so that another role can be taken in the same process."""

    def checkpoint_directory(self) -> Path | None:
        """Where durable checkpoints go; None for the run directory's own place."""
