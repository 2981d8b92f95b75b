"""What the run's own records are told of Megatron-LM's numbers, exactly."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core import parallel_state
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging

from deadpool_megatron.hooks.loop import Emit
from deadpool_megatron.hooks.pretraining.iterations.newest import GRAD_NORM, LOSSES, SKIPPED


class Reporter:
    """Emits on one role: the first tensor- and data-parallel one of the last pipeline stage."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._has_begun = False

    def _begin(self) -> None:
        """Say what is going to be trained, once."""
        from megatron.training import get_args

        args = get_args()
        if args.train_iters:
            facts = {"iterations": args.train_iters, "sequence_length": args.seq_length}
            self._emit("training", facts)
        self._has_begun = True

    def step(
        self, iteration: int, answer: tuple[Any, ...], optimizer: Any, counters: Mapping[str, int]
    ) -> None:
        """An iteration was trained; ``answer`` is what train_step() answered."""
        if not _speaks() or not answer[LOSSES]:
            return
        if not self._has_begun:
            self._begin()
        skipped, norm = bool(answer[SKIPPED]), answer[GRAD_NORM]
        rate = get_canonical_lr_for_logging(optimizer.param_groups)
        self._emit(
            "step",
            {
                "iteration": iteration,
                "loss": _loss(answer[LOSSES]),
                "grad_norm": None if skipped or norm is None else float(norm).hex(),
                "learning_rate": float(rate or 0.0).hex(),
                "skipped": skipped,
                "samples": counters["consumed_train_samples"],
            },
        )

    def evaluation(self, iteration: int, losses: Mapping[str, Any] | None) -> None:
        """An evaluation between iterations gave these mean losses."""
        if losses and _speaks():
            self._emit("evaluation", {"iteration": iteration, "loss": _loss(losses)})

    def lost_checkpoint(self, directory: Path, why: str) -> None:
        """A checkpoint could not be written; said by the role that calls this."""
        text = f"the checkpoint {directory} was not written and does not count: {why}"
        self._emit("log", {"level": "warning", "text": text})
        print(f"deadpool: {text}", flush=True)


def _speaks() -> bool:
    return bool(
        parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        and parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    )


def _loss(losses: Mapping[str, Any]) -> str:
    """The loss that is trained on, exactly: Megatron's models call it ``lm loss``."""
    value = losses.get("lm loss", next(iter(losses.values())))
    return float(value).hex()
