"""The training loop of the embedded trainer, and its data.

The loop consists of iterations, and of segments (evaluation, save) between them. The number of
consumed samples alone determines the next micro batch.
"""

from __future__ import annotations

import functools
import itertools
import os
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from deadpool_megatron import failpoints
from deadpool_megatron.megatron import identity as hashing
from deadpool_megatron.megatron.loop import MegatronLoop
from deadpool_megatron.member.loop import Emit, SteppedLoop
from deadpool_megatron.trainer import loop_checkpoint, megatron_api as mcore, model
from deadpool_megatron.trainer.config import BadArgumentsError, TrainerConfig
from deadpool_megatron.trainer.megatron_api import parallel_state

# A text is divided into this many parts, of which the last is for validation.
_VALIDATION_PARTS = 20
_DEFAULT_BYTES = 8 << 20
_COUNTERS = ["iteration", "consumed_train_samples", "consumed_valid_samples", "skipped_iterations"]
_EXCLUDED_FOLDERS = ("site-packages", "dist-packages", "__pycache__")

Batch = dict[str, torch.Tensor]
_Bytes = NDArray[np.uint8]


class TrainingLoop(SteppedLoop, MegatronLoop):
    """The training of a rank: the live objects, and the operations on them.

    ``emit(kind, facts)`` is called with the kinds ``training`` (once), ``step``, ``evaluation`` and
    ``log``, only on the first tensor- and data-parallel rank of the last pipeline stage. Losses,
    norms and rates are texts of ``float.hex()``; a norm is None if the update was skipped.

    ``counters`` and ``log_sums`` have all state outside of tensors and random generators. A restore
    sets their entries in place.
    """

    loads_extras = True

    def __init__(self, config: TrainerConfig, emit: Emit) -> None:
        """Build the objects for the rank and the world of torch.distributed, and Megatron's groups
        unless they exist. Collective.

        Raises BadArgumentsError if the layout does not fit the world, and DataError for unusable
        text.
        """
        self.config = config
        self.arguments = config, config  # all arguments, and those that the user has given
        self._emit = emit
        torch.use_deterministic_algorithms(True, warn_only=True)
        if not parallel_state.model_parallel_is_initialized():
            model.initialize_parallel_state(config)
        model.seed_generators(config)
        self._num_microbatches = config.num_microbatches(dist.get_world_size())
        self._sources = build_sources(
            config,
            parallel_state.get_data_parallel_rank(),
            parallel_state.get_data_parallel_world_size(),
        )
        self.model_chunks = model.build_model(config)
        self.optimizer: Any = model.build_optimizer(config, self.model_chunks)
        self.scheduler: Any = model.build_scheduler(config, self.optimizer)
        self.counters: dict[str, int] = dict.fromkeys(_COUNTERS, 0)
        self.log_sums: dict[str, float] = {"loss": 0.0, "iterations": 0.0, "skipped": 0.0}
        self._log_started = time.monotonic()
        self._microbatch = 0
        self._has_reported = False
        self.reset_after_interrupt()

    @property
    def models(self) -> list[torch.nn.Module]:
        """The model chunks without wrappers, for their own state dicts and attributes."""
        return [_unwrapped(chunk) for chunk in self.model_chunks]

    @property
    def done(self) -> bool:
        """Return whether all iterations have been trained."""
        return self.counters["iteration"] >= self.config.train_iters

    @property
    def is_reporting(self) -> bool:
        """Return whether this rank calls ``emit``."""
        return bool(
            parallel_state.is_pipeline_last_stage(ignore_virtual=True)
            and parallel_state.get_tensor_model_parallel_rank() == 0
            and parallel_state.get_data_parallel_rank() == 0
        )

    def stage_class(self) -> str:
        """Return a text that is equal for two ranks if each could use the objects of the other.

        The pipeline stage determines the layers. The tensor and expert ranks determine slices and
        offsets. The data-parallel rank determines the state that a distributed optimizer has.
        """
        place = f"pp{parallel_state.get_pipeline_model_parallel_rank()}"
        place += f".tp{parallel_state.get_tensor_model_parallel_rank()}"
        place += f".etp{parallel_state.get_expert_tensor_parallel_rank()}"
        place += f".ep{parallel_state.get_expert_model_parallel_rank()}"
        if self.config.use_distributed_optimizer:
            place += f".dp{parallel_state.get_data_parallel_rank()}"
        return place

    def train_step(self) -> None:
        """Train one iteration: forward, backward, optimizer, schedule, counters. Collective."""
        failpoints.set_context(iteration=self.counters["iteration"] + 1, section="forward-backward")
        failpoints.hit("step.begin")
        self._microbatch = 0
        self._clear_loss_tracker()
        for chunk in self.model_chunks:
            cast(Any, chunk).zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = self._forward_backward(self._train_iterators, forward_only=False)
        loss = self._mean_loss(losses)

        failpoints.set_context(section="optimizer")
        weights = (weight for chunk in self.model_chunks for weight in chunk.parameters())
        failpoints.maybe_corrupt_gradients(weights, "optimizer.before")
        updated, grad_norm, _ = self.optimizer.step()
        failpoints.hit("optimizer.after")
        if updated:
            self.scheduler.step(increment=self.config.global_batch_size)
        self.counters["iteration"] += 1
        self.counters["consumed_train_samples"] += self.config.global_batch_size
        self.counters["skipped_iterations"] += not updated
        self._report_step(loss, grad_norm if updated else None)
        failpoints.hit("step.end")
        failpoints.set_context(section="between")

    def segments_after(self, iteration: int) -> tuple[str, ...]:
        """Return the segments due after this iteration, in order: "evaluation", "save"."""
        config = self.config
        due = []
        if config.eval_interval is not None and iteration % config.eval_interval == 0:
            due.append("evaluation")
        if config.save is not None and (
            iteration == config.train_iters
            or (config.save_interval is not None and iteration % config.save_interval == 0)
        ):
            due.append("save")
        return tuple(due)

    def run_segment(self, name: str) -> None:
        """Run a segment of :meth:`segments_after`, perhaps for a second time. Collective."""
        failpoints.set_context(section=name)
        if name == "evaluation":
            self._evaluate()
        else:
            assert self.config.save is not None
            failpoints.hit("save.begin")
            loop_checkpoint.write_and_publish(self, self.config.save)
            failpoints.hit("save.written")
        failpoints.set_context(section="between")

    def reset_after_interrupt(self) -> None:
        """Drop the partial work that an exception may have left, and set the iterators according to
        the counters.

        Resets only the objects of this loop: iterators, training mode, the functions for Megatron's
        schedules, the MoE loss tracker. Draws from no generator.
        """
        chunks = len(self.model_chunks)
        train, valid = self._sources
        consumed = self.counters["consumed_train_samples"]
        self._train_iterators = [train.iterator_at(consumed) for _ in range(chunks)]
        consumed = self.counters["consumed_valid_samples"]
        self._valid_iterators = [valid.iterator_at(consumed) for _ in range(chunks)]
        for chunk in self.model_chunks:
            chunk.train()
        self._clear_loss_tracker()
        self._configure_schedule()
        failpoints.set_context(section="between")

    def synchronize_parameters(self) -> None:
        """Gather all current parameters. Collective. Does nothing without
        ``--overlap-param-gather``, which leaves the gather to the next iteration.
        """
        if self.config.overlap_param_gather:
            for chunk in self.model_chunks:
                cast(Any, chunk).start_param_sync(force_sync=True)

    def state_hash(self) -> str:
        """Return the SHA-256 of this rank's whole state, with current parameters. Collective."""
        self.synchronize_parameters()
        return hashing.state_hash(self)

    def save_checkpoint(self, directory: Path) -> None:
        """Write a torch_dist checkpoint of the whole state into ``directory``. Collective."""
        loop_checkpoint.write(self, directory)

    def checkpoint_state(self) -> dict[str, Any]:
        """Return the content of a checkpoint; see :class:`MegatronLoop`."""
        return loop_checkpoint.sharded_state(self)

    def load_checkpoint(self, directory: Path) -> None:
        """Load a checkpoint in place, so that training continues exactly. Collective."""
        loop_checkpoint.read(self, directory)

    def _configure_schedule(self) -> None:
        """Set the functions that Megatron's schedules call. The interleaved schedule may have unset
        some."""
        chunks = self.model_chunks
        settings = chunks[0].config
        settings.grad_scale_func = self.optimizer.scale_loss
        settings.finalize_model_grads_func = _finalize
        if self.config.overlap_grad_reduce:
            settings.no_sync_func = _single_or_all([chunk.no_sync for chunk in chunks])
            settings.grad_sync_func = _single_or_all([chunk.start_grad_sync for chunk in chunks])

    def _clear_loss_tracker(self) -> None:
        """Clear the balancing losses, which Megatron's routers sum for a log that does not exist
        here."""
        if self.config.num_experts is not None:
            mcore.clear_aux_losses_tracker()

    def _forward_backward(
        self, iterators: list[Iterator[Batch]], forward_only: bool
    ) -> list[dict[str, torch.Tensor]]:
        point = "evaluation.microbatch" if forward_only else "forward"
        losses: list[dict[str, torch.Tensor]] = self.around_passes(
            mcore.get_forward_backward_func()
        )(
            forward_step_func=functools.partial(self._forward_step, point),
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.model_chunks,
            num_microbatches=self._num_microbatches,
            seq_length=self.config.seq_length,
            micro_batch_size=self.config.micro_batch_size,
            forward_only=forward_only,
        )
        return losses

    def _forward_step(self, point: str, iterator: Iterator[Batch], chunk: torch.nn.Module) -> Any:
        number = self._microbatch
        self._microbatch += 1
        failpoints.hit(point, microbatch=number)
        output, loss_function = forward_step(iterator, chunk)
        if failpoints.ACTIVE and output.requires_grad:
            output.register_hook(lambda _grad: _hit_backward(number))
        return output, loss_function

    def _mean_loss(self, losses: list[dict[str, torch.Tensor]]) -> float | None:
        """Return the mean loss per token of the global batch; None on a rank without losses.
        Collective over the data-parallel peers with losses."""
        if not losses:
            return None
        total = torch.stack([entry["lm loss"] for entry in losses]).sum(dim=0)
        dist.all_reduce(
            total, group=parallel_state.get_data_parallel_group(with_context_parallel=True)
        )
        return float(total[0] / total[1])

    def _evaluate(self) -> None:
        failpoints.hit("evaluation.begin")
        config = self.config
        self._microbatch = 0
        self.synchronize_parameters()
        for chunk in self.model_chunks:
            chunk.eval()
        losses = []
        with torch.no_grad():
            for _ in range(config.eval_iters):
                losses += self._forward_backward(self._valid_iterators, forward_only=True)
        for chunk in self.model_chunks:
            chunk.train()
        loss = self._mean_loss(losses)
        self.counters["consumed_valid_samples"] += config.eval_iters * config.global_batch_size
        if self.is_reporting and loss is not None:
            facts = {"iteration": self.counters["iteration"], "loss": loss.hex()}
            self._emit("evaluation", facts)
        failpoints.hit("evaluation.end")

    def _report_step(self, loss: float | None, grad_norm: float | None) -> None:
        updated = grad_norm is not None
        if failpoints.ACTIVE and self.is_reporting and failpoints.hit("loss"):
            loss = float("nan")
        self.log_sums["iterations"] += 1
        self.log_sums["skipped"] += not updated
        self.log_sums["loss"] += loss or 0.0
        rate = float(mcore.get_canonical_lr_for_logging(self.optimizer.param_groups))
        if self.is_reporting and loss is not None:
            if not self._has_reported:
                config = self.config
                plan = {"iterations": config.train_iters, "sequence_length": config.seq_length}
                self._emit("training", plan)
            self._has_reported = True
            facts = {
                "iteration": self.counters["iteration"],
                "loss": loss.hex(),
                "grad_norm": float(grad_norm).hex() if grad_norm is not None else None,
                "learning_rate": rate.hex(),
                "skipped": not updated,
                "samples": self.counters["consumed_train_samples"],
            }
            self._emit("step", facts)
        if self.counters["iteration"] % self.config.log_interval == 0:
            self._log(rate)

    def _log(self, rate: float) -> None:
        """Emit the averages since the last log line, and reset them."""
        count = self.log_sums["iterations"]
        now = time.monotonic()
        if self.is_reporting:
            text = (
                f"iteration {self.counters['iteration']}/{self.config.train_iters}"
                f" | loss {self.log_sums['loss'] / count:.4f} | learning rate {rate:.3e}"
                f" | skipped {self.log_sums['skipped']:.0f}"
                f" | {1000 * (now - self._log_started) / count:.0f} ms per iteration"
            )
            self._emit("log", {"level": "info", "text": text})
        self._log_started = now
        self.log_sums.update(dict.fromkeys(self.log_sums, 0.0))


def forward_step(iterator: Iterator[Batch], chunk: torch.nn.Module) -> Any:
    """Run a chunk on the next micro batch; return its output and the loss function."""
    module = cast(Any, _unwrapped(chunk))
    if not (module.pre_process or module.post_process):
        # A middle stage gets its input from the schedule and needs no batch.
        return chunk(None, None, None), None
    batch = next(iterator)
    output = chunk(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, functools.partial(_loss, batch["loss_mask"])


def _loss(
    mask: torch.Tensor, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the sum of the token losses ``output`` [batch, sequence] under ``mask``, the number of
    tokens, and both in a tensor for the report. Megatron's schedule divides the sum."""
    total = (output.float() * mask).sum()
    tokens = mask.sum()
    report = torch.stack([total.detach(), tokens])
    return total, tokens.to(torch.int), {"lm loss": report}


def _finalize(*args: Any, **options: Any) -> None:
    mcore.finalize_model_grads(*args, **options)
    failpoints.hit("grads.final")


def _hit_backward(number: int) -> None:
    failpoints.hit("backward", microbatch=number)


def _single_or_all(functions: list[Any]) -> Any:
    """Return the function of a single chunk, else the list, as Megatron's schedules expect."""
    return functions[0] if len(functions) == 1 else functions


def _unwrapped(chunk: torch.nn.Module) -> torch.nn.Module:
    while isinstance(getattr(chunk, "module", None), torch.nn.Module):
        chunk = cast(torch.nn.Module, chunk.module)
    return chunk


class DataError(BadArgumentsError):
    """The training data cannot be used; the message is a line."""


class DataSource:
    """A split of the text, distributed over the data-parallel ranks as by Megatron's sampler.

    Samples are windows of the text. The seed determines their order in each pass over the text.
    Each group of ``micro_batch_size * data_parallel_size`` consecutive samples is divided into
    micro batches, of which rank r has the r-th. Nothing is drawn from a global random generator.
    """

    def __init__(self, text: _Bytes, config: TrainerConfig, rank: int, ranks: int) -> None:
        self._text, self._config = text, config
        self._rank, self._ranks = rank, ranks
        self._windows = (len(text) - 1) // config.seq_length
        if not self._windows:
            raise DataError(
                f"a text of {len(text)} bytes is less than one sample of --seq-length"
                f" {config.seq_length} and its successor"
            )
        self._order = functools.lru_cache(2)(self._order_of_pass)

    def indices_at(self, consumed_samples: int) -> Iterator[list[int]]:
        """Yield the sample numbers of each of this rank's micro batches after ``consumed_samples``;
        endless."""
        size = self._config.micro_batch_size
        for start in itertools.count(consumed_samples + self._rank * size, size * self._ranks):
            yield list(range(start, start + size))

    def iterator_at(self, consumed_samples: int) -> Iterator[Batch]:
        """Yield this rank's micro batches after ``consumed_samples``; endless.

        A micro batch has ``tokens``, ``labels``, ``position_ids`` (int64) and ``loss_mask``
        (float32), of shape [micro batch, sequence], on the current device.
        """
        positions = torch.arange(self._config.seq_length).expand(self._config.micro_batch_size, -1)
        mask = torch.ones(positions.shape)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        for indices in self.indices_at(consumed_samples):
            texts = torch.from_numpy(np.stack(list(map(self._sample, indices))).astype(np.int64))
            batch = {
                "tokens": texts[:, :-1].contiguous(),
                "labels": texts[:, 1:].contiguous(),
                "position_ids": positions,
                "loss_mask": mask,
            }
            yield {name: each.to(device, non_blocking=True) for name, each in batch.items()}

    def _sample(self, index: int) -> _Bytes:
        pass_number, position = divmod(index, self._windows)
        start = int(self._order(pass_number)[position]) * self._config.seq_length
        return self._text[start : start + self._config.seq_length + 1]

    def _order_of_pass(self, pass_number: int) -> NDArray[np.int64]:
        return np.random.default_rng([self._config.seed, pass_number]).permutation(self._windows)


def build_sources(config: TrainerConfig, rank: int, ranks: int) -> tuple[DataSource, DataSource]:
    """Return the training and validation data of data-parallel rank ``rank`` of ``ranks``.

    The data depends neither on other processes nor on the time at which a process joins. Raises
    DataError for too little text.
    """
    text = _text(config.data)
    validation_bytes = len(text) // _VALIDATION_PARTS
    parts = text[:-validation_bytes], text[-validation_bytes:]
    if validation_bytes <= config.seq_length:  # a short text serves for both
        parts = text, text
    training, validation = (DataSource(part, config, rank, ranks) for part in parts)
    return training, validation


@functools.cache
def _text(paths: tuple[Path, ...]) -> _Bytes:
    files = list(_files(paths) if paths else _standard_library())
    if not files:
        raise DataError(f"no text files in {', '.join(map(str, paths)) or 'the standard library'}")
    return np.frombuffer(b"".join(file.read_bytes() for file in files), dtype=np.uint8)


def _files(paths: tuple[Path, ...]) -> Iterator[Path]:
    for path in paths:
        yield from [path] if path.is_file() else sorted(filter(_is_text, path.rglob("*")))


def _standard_library() -> Iterator[Path]:
    """Yield Python's own source files in a fixed order, up to _DEFAULT_BYTES."""
    total = 0
    for folder, folders, names in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = sorted(name for name in folders if name not in _EXCLUDED_FOLDERS)
        for name in sorted(name for name in names if name.endswith(".py")):
            file = Path(folder, name)
            total += file.stat().st_size
            if total > _DEFAULT_BYTES:
                return
            yield file


def _is_text(path: Path) -> bool:
    if not path.is_file() or path.name.startswith("."):
        return False
    with path.open("rb") as stream:
        return b"\0" not in stream.read(8192)
