"""The newest iteration, as far as train() has to know it to be entered again behind it.

What a training step returns, and the sums of the log, become JSON and come back exactly: Python
writes the shortest text that reads back the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deadpool_megatron.hooks.capture.megatron_extras import capture_loss_sums, restore_loss_sums

# Positions in what train_step() answers in 0.16.
LOSSES, SKIPPED, SHOULD_EXIT, GRAD_NORM = 0, 1, 3, 5
# Of Megatron's arguments: what an iteration changes.
POSITIONS = ("consumed_train_samples", "skipped_train_samples")


class Newest:
    """The answer of ``train_step()`` in the newest iteration, and what was there before it.

    Kept as JSON, exactly, because it travels with the generation. ``operations``: Megatron's count
    of floating-point operations, which train() keeps in a local variable.
    """

    def __init__(self, operations: float) -> None:
        self.operations = operations
        self._answer: Any = None
        self._before: dict[str, Any] = {}
        # Sums of the log as training_log() found them.
        self._sums: Any = encode({})
        #: what consume_seqlen_stats_in_iteration() answered: sums over packed sequences
        self.lengths: list[float | None] = []
        # Sums that Megatron keeps elsewhere, and empties when it logs them.
        self._loss_sums: Any = encode({})

    @property
    def known(self) -> bool:
        """Return whether there is an answer; not at the start and after a load of a checkpoint."""
        return self._answer is not None

    @property
    def skipped(self) -> int:
        """Return whether the update was skipped, as train_step() answers it."""
        return int(self._answer["tuple"][SKIPPED])

    @property
    def positions_before(self) -> dict[str, Any]:
        """:data:`POSITIONS` before the iteration, as far as they are known."""
        return {name: self._before[name] for name in POSITIONS if name in self._before}

    @property
    def operations_before(self) -> float:
        """:attr:`operations` before the iteration."""
        return float(self._before.get("operations", self.operations))

    def begin(self, args: Any, gathers_ahead: bool) -> None:
        """An iteration is about to be trained. ``gathers_ahead``: parameters are gathered by the
        forward pass that needs them (--overlap-param-gather, after the first update)."""
        self._before = {name: getattr(args, name) for name in POSITIONS}
        self._before.update(operations=self.operations, gathers_ahead=gathers_ahead)

    def finish(self, answer: tuple[Any, ...], sums: Mapping[str, Any]) -> None:
        """It is trained. ``sums``: of the log, not yet with this iteration."""
        self._answer, self._sums = encode(answer), encode(dict(sums))
        self._loss_sums = encode(capture_loss_sums())

    def replay(self, device: torch.device) -> tuple[Any, ...]:
        """The answer, for train() to continue behind it.

        After the first iteration it trains, train() has parameters gathered ahead, unless the
        update was skipped. Where that had begun before a skipped one, it must begin here: the
        truth is in :attr:`skipped`.
        """
        answer = list(decode(self._answer, device))
        if self._before["gathers_ahead"]:
            answer[SKIPPED] = 0
        return tuple(answer)

    def sums(self, device: torch.device) -> dict[str, Any]:
        """Sums of the log as training_log() has to find them for this iteration."""
        found: dict[str, Any] = decode(self._sums, device)
        return found

    def put_back_loss_sums(self, device: torch.device) -> None:
        """Those of auxiliary losses, as training_log() has to find them: a generation of after an
        evaluation holds what it has left of them."""
        restore_loss_sums(decode(self._loss_sums, device))

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "answer": self._answer,
            "before": self._before,
            "sums": self._sums,
            "loss_sums": self._loss_sums,
            "operations": self.operations,
            "lengths": self.lengths,
        }

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Inverse of :meth:`to_dict`, in place."""
        self._answer, self._before = kept["answer"], dict(kept["before"])
        self._sums, self.operations = kept["sums"], kept["operations"]
        self._loss_sums, self.lengths = kept["loss_sums"], list(kept["lengths"])


def encode(value: Any) -> Any:
    """JSON form of None, numbers, strings, tensors of numbers, and tuples, lists, dicts of those.

    Raises TypeError for anything else: it could not be given back after a recovery.
    """
    if isinstance(value, Tensor):
        flat = value.detach().cpu()
        kind = str(flat.dtype).removeprefix("torch.")
        return {"tensor": flat.reshape(-1).tolist(), "dtype": kind, "shape": list(flat.shape)}
    if isinstance(value, dict):
        return {"dict": [[key, encode(entry)] for key, entry in value.items()]}
    if isinstance(value, tuple | list):
        return {type(value).__name__: [encode(entry) for entry in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a {type(value).__name__} in the result of train_step cannot be kept")


def decode(value: Any, device: torch.device) -> Any:
    """Inverse of :func:`encode`; tensors on ``device``."""
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        dtype = getattr(torch, value["dtype"])
        return torch.tensor(value["tensor"], dtype=dtype).reshape(value["shape"]).to(device)
    if "dict" in value:
        return {key: decode(entry, device) for key, entry in value["dict"]}
    if "tuple" in value:
        return tuple(decode(entry, device) for entry in value["tuple"])
    return [decode(entry, device) for entry in value["list"]]
