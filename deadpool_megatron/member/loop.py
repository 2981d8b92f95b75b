"""The loop of one role, which a training program provides, and how loops are made."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

from deadpool_megatron.member.framework import Framework

# emit(kind, data): kind is the value of an events.Kind, data holds JSON values only.
Emit = Callable[[str, Mapping[str, Any]], None]


_Result = TypeVar("_Result")


class StepRunner(Protocol):
    """Runner of the iterations and segments of a loop in an open epoch, under protection.

    All methods raise EpochClosed when the epoch is closed. Main thread only.
    """

    #: number of the membership; a recovery makes a higher one
    epoch: int
    #: count of finished iterations that this epoch computes again, as known at its opening
    recomputed: int

    def includes(self, boundary: str) -> bool:
        """Return whether the state already includes segment ``boundary`` of the newest
        iteration."""

    def step(self, iteration: int, run: Callable[[], _Result]) -> _Result:
        """Train ``iteration`` by calling ``run``; the new state becomes the newest generation."""

    def segment(self, boundary: str, run: Callable[[], None]) -> None:
        """Run a segment after the newest generation, unless the state includes it already."""

    def save(self, loop: SteppedLoop) -> None:
        """Run segment ``save`` through the loop's ``save_checkpoint`` and the coordinator."""

    def capture_extras(self) -> bytes:
        """Return the current extras, for a checkpoint that is complete later."""

    def count_as_durable(self, directory: Path, iteration: int, extras: bytes) -> None:
        """Make a checkpoint that the loop has written itself the fall-back of the run.

        It is complete in ``directory``. All roles call this, each with its ``extras`` at the moment
        of the save, which are written into its folder.
        """

    def check(self) -> None:
        """Raise EpochClosed if the epoch has ended: later results may be junk."""


class ProtectedLoop(ABC):
    """A training loop whose state can be captured and restored between any two segments.

    ``counters`` holds at least ``iteration`` (finished iterations) and every other whole number an
    iteration changes; ``log_sums`` running sums of logged values. All state that is neither a
    tensor of model or optimizer, nor the scheduler, nor a random state must be in these two, or in
    :meth:`extra_state`.
    """

    counters: dict[str, int]
    log_sums: dict[str, float]
    #: the progress, if train() returned before the last iteration
    early: str = ""
    #: the checkpoint after the last iteration, and the reason why it could not be written
    unsaved: str = ""
    #: the checkpoint that the program has loaded, whole, while it was built
    loaded: Path | None = None
    #: whether load_checkpoint() restores extras as well, at any number of roles
    loads_extras = False

    @abstractmethod
    def train(self, runner: StepRunner) -> None:
        """Train from where the restored state is to the end, through ``runner``. Left by an
        exception at every interrupt, and called again after the restore."""

    @abstractmethod
    def warm_up(self) -> None:
        """About one iteration without peers, whose results are thrown away."""

    @abstractmethod
    def reset_after_interrupt(self) -> None:
        """Drop in-flight state and rebuild the data iterators from ``counters``."""

    @abstractmethod
    def load_checkpoint(self, directory: Path) -> None:
        """Collectively read one into the live objects."""

    @abstractmethod
    def stage_class(self) -> str:
        """Equal for roles whose model parts have equal shapes."""

    @abstractmethod
    def state_hash(self) -> str:
        """sha256 over parameters, optimizer state, random states, scheduler and counters."""

    def extra_state(self) -> dict[str, Any]:
        """More that travels with a generation, by name: JSON values, bytes and tensors."""
        return {}

    def close(self) -> None:  # noqa: B027 (many have nothing)
        """Release the model and all that must not wait for the garbage collector; the loop is not
        used again."""

    def restore_extra_state(self, values: Mapping[str, Any]) -> None:
        """Inverse of :meth:`extra_state`. Not called at the start of a run, unless it starts from a
        checkpoint: before each load of a checkpoint it gets the values after the build."""
        if values:
            raise ValueError(f"state that nobody takes: {', '.join(values)}")


class SteppedLoop(ProtectedLoop):
    """A loop without an outer loop of its own: one call for an iteration, one for a segment."""

    @property
    @abstractmethod
    def done(self) -> bool:
        """True when the last iteration is finished."""

    @abstractmethod
    def train_step(self) -> None:
        """Exactly one iteration, optimizer and scheduler step included."""

    @abstractmethod
    def segments_after(self, iteration: int) -> tuple[str, ...]:
        """Return the segments due after ``iteration``: ``evaluation``, ``save``, in that order."""

    @abstractmethod
    def run_segment(self, name: str) -> None:
        """Run ``evaluation`` (``save`` is done by the session through save_checkpoint)."""

    @abstractmethod
    def save_checkpoint(self, directory: Path) -> None:
        """Collectively write a standard checkpoint into ``directory``."""

    def train(self, runner: StepRunner) -> None:
        """Iterations and segments in turn; see :class:`ProtectedLoop`."""
        if self.counters["iteration"]:
            self._run_segments(runner)
        while not self.done:
            runner.step(self.counters["iteration"] + 1, self.train_step)
            self._run_segments(runner)

    def warm_up(self) -> None:
        """One iteration; see :class:`ProtectedLoop`."""
        self.train_step()

    def _run_segments(self, runner: StepRunner) -> None:
        for name in self.segments_after(self.counters["iteration"]):
            if name == "save":
                runner.save(self)
            else:
                runner.segment(name, functools.partial(self.run_segment, name))


class Program(ABC):
    """Maker of the loop, again and again, for the role that the environment names."""

    @abstractmethod
    def make_groups(self) -> None:
        """``init_process_group`` and all groups, for RANK and WORLD_SIZE as they are now."""

    @abstractmethod
    def make_loop(self, emit: Emit) -> ProtectedLoop:
        """Model, optimizer, scheduler and data in the groups just made."""

    @abstractmethod
    def framework(self, loop: ProtectedLoop) -> Framework:
        """Take the state of ``loop`` under protection. Raises UnsupportedState."""

    @abstractmethod
    def drop_groups(self) -> None:
        """Undo :meth:`make_groups`, so that another role can be taken in the same process."""

    def serves(self, loop: ProtectedLoop, role: int) -> bool:
        """Return whether the model of ``loop``, built for another role, serves ``role`` as it
        is."""
        return False

    def renumber(self, loop: ProtectedLoop, emit: Emit) -> ProtectedLoop:
        """The loop of the role that RANK names now, on the model of ``loop``, which :meth:`serves`.

        The group objects are those of that role already; functions that make groups answer them
        when they are called again, in the same order.
        """
        raise RuntimeError("a program whose loops serve other roles has to say how")

    def provisional_role(self, wanted: int, world_size: int) -> int:
        """The role that a spare builds for while it waits, where ``wanted`` is suggested, in a run
        of ``world_size`` roles."""
        return wanted

    def checkpoint_directory(self) -> Path | None:
        """Return where durable checkpoints go; None for the run directory's own place."""
        return None

    def loaded_checkpoint(self, iteration: int) -> Path | None:
        """Return the checkpoint that the loop has begun with, after ``iteration``, if a run can
        fall back to it."""
        return None

    def spares_may_build(self) -> bool:
        """False while the active roles still make files that a build without peers needs."""
        return True
