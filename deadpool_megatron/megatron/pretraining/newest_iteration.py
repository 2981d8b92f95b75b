"""The results of the newest iteration, for an entry into train() that continues after it.

The return value of a training step, and the sums of the log, are kept as encoded extras, from which
they are restored exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from deadpool_megatron.megatron.loop_extras import capture_loss_sums, restore_loss_sums
from deadpool_megatron.state import extras as codec

# Indices of the return value of train_step(), since 0.16.
LOSSES, SKIPPED, SHOULD_EXIT, GRAD_NORM = 0, 1, 3, 5
# Megatron's arguments that an iteration changes.
POSITIONS = ("consumed_train_samples", "skipped_train_samples")


class NewestIteration:
    """The return value of ``train_step()`` in the newest iteration, and the counters before it.

    The return value is kept as exact bytes, because it travels with the generation. ``operations``:
    Megatron's count of floating-point operations, which train() keeps in a local variable.
    """

    def __init__(self, operations: float) -> None:
        self.operations = operations
        self._before: dict[str, Any] = {}
        #: the result of consume_seqlen_stats_in_iteration(): sums over packed sequences
        self.lengths: list[float | None] = []
        # Encoded: the return value, the sums of the log as training_log() found them, and the sums
        # of auxiliary losses, which Megatron empties when it logs them. No bytes before the first
        # iteration.
        self._kept = b""

    @property
    def known(self) -> bool:
        """Return whether there was an iteration since the start, or since the load of a
        checkpoint."""
        return bool(self._kept)

    @property
    def skipped(self) -> int:
        """Return whether the update was skipped, as train_step() returns it."""
        return int(codec.decode(self._kept)["answer"][SKIPPED])

    @property
    def positions_before(self) -> dict[str, Any]:
        """The values of :data:`POSITIONS` before the iteration, as far as they are known."""
        return {name: self._before[name] for name in POSITIONS if name in self._before}

    @property
    def operations_before(self) -> float:
        """The value of :attr:`operations` before the iteration."""
        return float(self._before.get("operations", self.operations))

    def begin(self, args: Any, gathers_ahead: bool) -> None:
        """Note the counters before an iteration. ``gathers_ahead``: the forward pass gathers the
        parameters that it needs (--overlap-param-gather, after the first update)."""
        self._before = {name: getattr(args, name) for name in POSITIONS}
        self._before.update(operations=self.operations, gathers_ahead=gathers_ahead)

    def finish(self, answer: tuple[Any, ...], sums: Mapping[str, Any]) -> None:
        """Keep the ``answer`` of train_step(), and the ``sums`` of the log before it."""
        kept = {"answer": answer, "sums": dict(sums), "loss_sums": capture_loss_sums()}
        self._kept = codec.encode(kept)

    def replay(self, device: torch.device) -> tuple[Any, ...]:
        """Return the answer again, for train() to continue after it.

        After its first iteration, train() begins to gather parameters ahead, unless that iteration
        skipped its update. If parameters were gathered ahead before the newest iteration already,
        this must continue even if the newest iteration skipped its update. So the answer hides the
        skip; :attr:`skipped` has the truth.
        """
        answer = codec.decode(self._kept, device)["answer"]
        if self._before["gathers_ahead"]:
            answer[SKIPPED] = 0
        return tuple(answer)

    def sums(self, device: torch.device) -> dict[str, Any]:
        """Return the sums of the log as training_log() has to find them for this iteration."""
        return dict(codec.decode(self._kept, device)["sums"])

    def restore_loss_sums(self) -> None:
        """Restore the sums of auxiliary losses as training_log() has to find them: in a generation
        captured after an evaluation, the log has emptied them."""
        restore_loss_sums(codec.decode(self._kept)["loss_sums"])

    def to_dict(self) -> dict[str, Any]:
        """Return the argument of :meth:`restore`, as values of extras."""
        return {
            "kept": self._kept,
            "before": self._before,
            "operations": self.operations,
            "lengths": self.lengths,
        }

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Inverse of :meth:`to_dict`, in place."""
        self._kept, self._before = kept["kept"], dict(kept["before"])
        self.operations, self.lengths = kept["operations"], list(kept["lengths"])
