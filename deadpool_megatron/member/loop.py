"""The loop of one role, and the maker of such loops: both are provided by a training program."""

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
    """The runner of the iterations and segments of a loop in an open epoch, under protection.

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
        """Return the current extras, for a checkpoint that is completed later."""

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
    iteration changes; ``log_sums`` holds running sums of logged values. All state that is neither a
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
        """Train from the restored state to the end, through ``runner``. An exception ends this call
        at every interrupt; it is made again after the restore."""

    @abstractmethod
    def warm_up(self) -> None:
        """Run about one iteration without peers; its results are discarded."""

    @abstractmethod
    def reset_after_interrupt(self) -> None:
        """Drop in-flight state and rebuild the data iterators from ``counters``."""

    @abstractmethod
    def load_checkpoint(self, directory: Path) -> None:
        """Collectively read a checkpoint into the live objects."""

    @abstractmethod
    def stage_class(self) -> str:
        """Return a text that is equal for roles whose model parts have equal shapes."""

    @abstractmethod
    def state_hash(self) -> str:
        """Return the sha256 of parameters, optimizer state, random states, scheduler and
        counters."""

    def extra_state(self) -> dict[str, Any]:
        """Return additional state of a generation, by name: JSON values, bytes and tensors."""
        return {}

    def close(self) -> None:  # noqa: B027 (many loops have none to release)
        """Release the model and all that must not wait for the garbage collector; the loop is not
        used again."""

    def restore_extra_state(self, values: Mapping[str, Any]) -> None:
        """Restore the values of :meth:`extra_state`. At the start of a run this is called only if
        the run starts from a checkpoint: before each load of a checkpoint it gets the values from
        right after the build."""
        if values:
            raise ValueError(f"state that nobody takes: {', '.join(values)}")


class SteppedLoop(ProtectedLoop):
    """A loop without an outer loop of its own: one call for an iteration, one for a segment."""

    @property
    @abstractmethod
    def done(self) -> bool:
        """Return whether the last iteration is finished."""

    @abstractmethod
    def train_step(self) -> None:
        """Train exactly one iteration, optimizer and scheduler step included."""

    @abstractmethod
    def segments_after(self, iteration: int) -> tuple[str, ...]:
        """Return the segments due after ``iteration``: ``evaluation``, ``save``, in that order."""

    @abstractmethod
    def run_segment(self, name: str) -> None:
        """Run ``evaluation``. (The session runs ``save``, by :meth:`save_checkpoint`.)"""

    @abstractmethod
    def save_checkpoint(self, directory: Path) -> None:
        """Collectively write a standard checkpoint into ``directory``."""

    def train(self, runner: StepRunner) -> None:
        """Run iterations and segments in turn; see :class:`ProtectedLoop`."""
        if self.counters["iteration"]:
            self._run_segments(runner)
        while not self.done:
            runner.step(self.counters["iteration"] + 1, self.train_step)
            self._run_segments(runner)

    def warm_up(self) -> None:
        """Run one iteration; see :class:`ProtectedLoop`."""
        self.train_step()

    def _run_segments(self, runner: StepRunner) -> None:
        for name in self.segments_after(self.counters["iteration"]):
            if name == "save":
                runner.save(self)
            else:
                runner.segment(name, functools.partial(self.run_segment, name))


class Program(ABC):
    """The maker of loops, each for the role that the environment names at that time."""

    @abstractmethod
    def make_groups(self) -> None:
        """Call ``init_process_group``, and make all groups for the present RANK and WORLD_SIZE."""

    @abstractmethod
    def make_loop(self, emit: Emit) -> ProtectedLoop:
        """Make a loop: model, optimizer, scheduler and data, in the groups that were just made."""

    @abstractmethod
    def framework(self, loop: ProtectedLoop) -> Framework:
        """Take the state of ``loop`` under protection. Raises UnsupportedState."""

    @abstractmethod
    def drop_groups(self) -> None:
        """Undo :meth:`make_groups`, so that another role can be taken in the same process."""

    def serves(self, loop: ProtectedLoop, role: int) -> bool:
        """Return whether the model of ``loop``, built for another role, serves ``role``
        unchanged."""
        return False

    def renumber(self, loop: ProtectedLoop, emit: Emit) -> ProtectedLoop:
        """Return a loop for the role that RANK names now, on the model of ``loop``, which serves
        that role (:meth:`serves`).

        The group objects belong to that role already: functions that make groups return them when
        they are called again, in the same order.
        """
        raise RuntimeError("a program whose loops serve other roles has to say how")

    def provisional_role(self, wanted: int, world_size: int) -> int:
        """Return the role for which a spare builds while it waits, in a run of ``world_size``
        roles; ``wanted`` is the suggested role."""
        return wanted

    def checkpoint_directory(self) -> Path | None:
        """Return where durable checkpoints go; None for the run directory's own place."""
        return None

    def loaded_checkpoint(self, iteration: int) -> Path | None:
        """Return the checkpoint of ``iteration`` from which the loop has started, if a run can fall
        back to it."""
        return None

    def spares_may_build(self) -> bool:
        """Return False while the active roles still make files that a build without peers
        needs."""
        return True
