"""Megatron-LM's train() and the end of pretrain(), as a loop that a session protects.

Every recovery enters train() again, on all roles, on the objects that were built once. To resume
after iteration k, train() begins *with* k: the step returns its earlier result, which travels with
the generation. The work of train() after a step (log, evaluation, save, decision to exit) is
repeated, or left out where the state already includes it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron.core import num_microbatches_calculator as microbatches, parallel_state
from megatron.core.rerun_state_machine import get_rerun_state_machine

from deadpool_megatron import failpoints
from deadpool_megatron.megatron import identity as hashing
from deadpool_megatron.megatron.exact_load import load_exactly
from deadpool_megatron.megatron.loop import MegatronLoop
from deadpool_megatron.megatron.pretraining import newest_iteration, per_entry_state, stages
from deadpool_megatron.megatron.pretraining.build import Build
from deadpool_megatron.megatron.pretraining.dispatch import bound_arguments, use_handlers
from deadpool_megatron.megatron.pretraining.logbook import Logbook, Reporter
from deadpool_megatron.megatron.pretraining.megatron_checkpoints import Saves, saved_state
from deadpool_megatron.megatron.pretraining.newest_iteration import NewestIteration
from deadpool_megatron.megatron.replacement import replaced
from deadpool_megatron.member.loop import Emit, StepRunner
from deadpool_megatron.member.peer_comparison import current_device
from deadpool_megatron.support.flags import named_arguments

# Megatron's arguments that are positions in the data.
_POSITIONS = (*newest_iteration.POSITIONS, "consumed_valid_samples")
# This module is loaded only if it has read a checkpoint; since 0.17 it keeps metadata by path.
METADATA_READER = "megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader"


class _WarmedUp(BaseException):
    """Leaves train() after the step of a warm-up."""


class _NoGeneration(BaseException):
    """A step that ends the run made no update. ``answer``: the result of the step."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer


class PretrainLoop(MegatronLoop):
    """See the module text. ``pretrain``: Megatron's function with its arguments."""

    def __init__(
        self, build: Build, pretrain: Callable[[], Any], run_directory: Path, emit: Emit
    ) -> None:
        from megatron.training import get_args

        self._args = args = get_args()
        self.arguments = args, named_arguments(sys.argv)
        self.loaded = loaded_checkpoint(args, args.iteration)
        self.build = build
        self.role = args.rank
        self._pretrain = pretrain
        self._reporter = Reporter(emit)
        self.model_chunks, self.optimizer, self.scheduler = build.objects
        self.counters = {"iteration": args.iteration, **self._positions()}
        self.log_sums = {}
        self._first_iteration = args.iteration + 1
        self._runner: StepRunner | None = None
        self._saves = Saves(self._announce, self._reporter.lost_checkpoint)
        self._logbook = Logbook(run_directory)
        self._restored = False
        self._newest = NewestIteration(args.num_floating_point_operations_so_far)
        self._operations = self._newest.operations
        # The sums of the log that train() holds; None from an entry into train() to its first log.
        self._sums: dict[str, Any] | None = None
        self._to_replay = 0
        # The iteration of the checkpoint from which the run continued last. All roles have to agree
        # on it, so a process that takes over a role gets it with the state.
        self._passed = 0
        self._just_loaded: int | None = None
        self._take_lengths: Callable[[], Iterable[float | None]] = tuple
        arguments = build.train_arguments
        arguments["forward_step_func"] = _faults_in_forward(arguments["forward_step_func"])

    # The interface to a session.

    def train(self, runner: StepRunner) -> None:
        """See :class:`ProtectedLoop`."""
        self._runner = runner
        self.build.user_buffers.renew()
        # The lines of the newest iteration are written again if its evaluation is repeated.
        logs_newest = self._newest.known and not runner.includes("evaluation")
        self._logbook.open(self._restored, self.counters["iteration"] + (not logs_newest))
        self._go_to_start()
        handlers: dict[str, Callable[..., Any]] = {
            "train_step": self._train_step,
            "training_log": self._log,
            "evaluate": self._evaluate_once,
            "evaluate_and_print_results": functools.partial(self._evaluate, "evaluation"),
            "save_checkpoint": self._save,
            "checkpoint_and_decide_exit": self._decide_exit,
        }
        done = self.counters["iteration"] if self._newest.known else None
        first = self._first_iteration - 1
        entering = per_entry_state.for_training(lambda: self._newest.lengths, done, first)
        try:
            with self._saves.watched():
                with use_handlers(handlers), entering as take_lengths:
                    self._take_lengths = take_lengths
                    result = self.build.train(**self.build.train_arguments)
                self._follow_up(result)
        except SystemExit as stop:
            # The run ends by a decision of all roles, as with --exit-interval.
            if stop.code not in (None, 0):
                raise
        self._saves.poll()
        self._logbook.close()
        iteration, last = self.counters["iteration"], self._args.train_iters
        self.early = f"{iteration} of {last} iterations" if iteration < last else ""
        self.unsaved = self._saves.lost.get(iteration, "")

    def warm_up(self) -> None:
        """See :class:`ProtectedLoop`: train() up to the end of its first step."""
        if self._args.moe_token_dispatcher_type == "flex" or self._args.tp_comm_overlap:
            return  # the buffers of these features map memory of peers when they are made

        def step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            raise _WarmedUp

        warm_up = per_entry_state.for_warm_up()
        with use_handlers({"train_step": step}), warm_up, contextlib.suppress(_WarmedUp):
            self.build.train(**self.build.train_arguments)

    def reset_after_interrupt(self) -> None:
        """See :class:`ProtectedLoop`. At the start of a run no state needs a reset."""
        if not self._restored:
            return
        self._abandon_saves()
        self._set_positions(self.counters)
        # From another number Megatron would guess how many validation samples were consumed, as for
        # checkpoints that did not store it (training.py:3350), even if no sample was consumed.
        self._args.iteration = 0
        self.build.renew_iterators()

    def load_checkpoint(self, directory: Path) -> None:
        """See :class:`ProtectedLoop`."""
        from megatron.training import checkpointing

        args = self._args
        self._abandon_saves()
        reader = getattr(sys.modules.get(METADATA_READER), "CachedMetadataFileSystemReader", None)
        if (forget := getattr(reader, "clear_metadata_cache", None)) is not None:
            # This process may have read the path before it was overwritten.
            forget()
        number = int(directory.name.removeprefix("iter_"))
        is_older = any(directory.glob("mp_rank_*"))
        # The user's flags are about the start of the run, and about saves, in whose form Megatron
        # loads. This checkpoint has to be loaded whole.
        parts = ("finetune", "no_load_optim", "no_load_rng", "no_save_optim", "no_save_rng")
        whole = replaced(
            args,
            load=str(directory.parent),
            ckpt_step=number,
            ckpt_format="torch" if is_older else "torch_dist",
            exit_on_missing_checkpoint=True,
            pretrained_checkpoint=None,
            **dict.fromkeys(parts, False),
        )
        # In the older format Megatron takes the optimizer's shards from the checkpoint that the
        # tracker names.
        tracked = replaced(checkpointing, read_metadata=lambda _: (number, False))
        args.consumed_train_samples = args.consumed_valid_samples = args.skipped_train_samples = 0
        self.scheduler.num_steps = 0  # a load adds its steps
        with whole, tracked:
            load, objects = checkpointing.load_checkpoint, self.build.objects
            iteration, operations = load_exactly(load, *objects, checkpointing_context={})
        # The load sets the parameter groups before it sets the checkpoint's weight decay.
        self.scheduler.step(increment=0)
        self.counters.update(iteration=iteration, **self._positions())
        self._newest, self._operations = NewestIteration(operations), operations
        self._saves.restore(0)
        self._passed = self._just_loaded = iteration

    def checkpoint_state(self) -> dict[str, Any]:
        """See :class:`ProtectedLoop`."""
        return saved_state(self.build.objects)

    def stage_class(self) -> str:
        """See :class:`ProtectedLoop`."""
        return self.class_of(self.role)

    def model_arguments(self) -> dict[str, Any]:
        """See :class:`ProtectedLoop`, and Megatron's check_checkpoint_args()."""
        args = self._args
        names = ["add_position_embedding", "position_embedding_type", "data_parallel_random_init"]
        if args.vocab_file:
            names += ["max_position_embeddings", "make_vocab_size_divisible_by", "tokenizer_type"]
        return {**super().model_arguments(), **{name: getattr(args, name) for name in names}}

    def class_of(self, role: int) -> str:
        """Return the stage class of any role."""
        return stages.stage_class(self._args, self.build.train_arguments["config"], role)

    def state_hash(self) -> str:
        """See :class:`ProtectedLoop`."""
        if self._args.overlap_param_gather:
            for chunk in self.model_chunks:
                chunk.start_param_sync(force_sync=True)
        return hashing.state_hash(self)

    def close(self) -> None:
        """See :class:`ProtectedLoop`."""
        super().close()
        self.build.close()

    def extra_state(self) -> dict[str, Any]:
        """See :class:`ProtectedLoop`."""
        return {
            "newest": self._newest.to_dict(),
            "first_iteration": self._first_iteration,
            "unfinished_save": self._saves.unfinished,
            "passed": self._passed if self._passed == self.counters["iteration"] else 0,
            # The count after the iteration, which exports need (saved_state).
            "operations": self._operations,
        }

    def restore_extra_state(self, kept: Mapping[str, Any]) -> None:
        """See :class:`ProtectedLoop`."""
        self._restored = True
        self._newest.restore(kept["newest"])
        self._operations = kept["operations"]
        self._first_iteration = kept["first_iteration"]
        self._saves.restore(kept["unfinished_save"])
        # The extras in a checkpoint name only the previous checkpoint.
        self._passed = kept["passed"] if self._just_loaded is None else self._just_loaded
        self._just_loaded = None

    # The entry into train(), and the part of pretrain() after it.

    def _go_to_start(self) -> None:
        """Set Megatron's arguments as train() has to find them: before the newest iteration, whose
        result is replayed, or after it where there is no result."""
        from megatron.training import get_timers

        args, iteration = self._args, self.counters["iteration"]
        self._to_replay = iteration if self._newest.known else 0
        args.iteration = iteration - (1 if self._to_replay else 0)
        args.curr_iteration = args.iteration
        self._set_positions({**self.counters, **self._newest.positions_before})
        args.num_floating_point_operations_so_far = self._newest.operations_before
        self._sums = None
        microbatches.update_num_microbatches(args.consumed_train_samples, consistency_check=False)
        self.build.train_arguments["config"].timers = get_timers()

    def _follow_up(self, result: Any) -> None:
        """Run the part of pretrain() after train() has returned ``result``: last save, evaluations.

        The functions that pretrain() calls before that have no effect, or return built objects.
        """
        from megatron.training import training

        iterators = iter(self.build.iterators)
        muted = contextlib.ExitStack()

        def after_training(*_args: Any, **_kwargs: Any) -> Any:
            muted.close()
            return result

        handlers = {
            "initialize_megatron": _nothing,
            "set_jit_fusion_options": _nothing,
            "setup_model_and_optimizer": lambda *args, **kwargs: self.build.objects,
            "build_train_valid_test_data_iterators": lambda *args: next(iterators),
            "train": after_training,
            "evaluate_and_print_results": self._evaluate_at_the_end,
            "save_checkpoint": self._save,
        }
        with use_handlers(handlers), muted:
            muted.enter_context(contextlib.redirect_stdout(io.StringIO()))
            muted.enter_context(replaced(training, append_to_progress_log=_nothing))
            self._pretrain()

    # Handlers of Megatron's functions.

    def _train_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        iteration = bound_arguments(original, args, kwargs)["iteration"] + 1
        if iteration == self._to_replay:
            self._to_replay = 0
            get_rerun_state_machine().current_iteration = iteration
            return self._newest.replay(current_device())
        self._saves.poll()
        failpoints.set_context(iteration=iteration, section="forward-backward")
        failpoints.hit("step.begin")
        hooks = getattr(self.model_chunks[0], "remove_forward_pre_hook_handles", {})
        self._newest.begin(self._args, gathers_ahead=bool(hooks))
        try:
            return self._running.step(
                iteration, lambda: self._update(original, args, kwargs, iteration)
            )
        except _NoGeneration as end:
            # Megatron saves and ends the run now; the save belongs to no generation.
            self._runner = None
            return end.answer

    def _update(
        self, original: Callable[..., Any], args: Any, kwargs: dict[str, Any], iteration: int
    ) -> Any:
        """Run the step, and record all facts that another process needs to continue after it."""
        from megatron.training import training

        bound = bound_arguments(original, args, kwargs)
        bound["forward_backward_func"] = self.around_passes(bound["forward_backward_func"])
        answer = original(**bound)
        self._newest.lengths = list(self._take_lengths())
        if answer[newest_iteration.SHOULD_EXIT]:
            raise _NoGeneration(answer)
        self._newest.finish(answer, self._sums or {})
        replicas = parallel_state.get_data_parallel_world_size()
        batch = replicas * self._args.micro_batch_size * microbatches.get_num_microbatches()
        skipped = microbatches.get_current_global_batch_size()
        skipped -= microbatches.get_current_running_global_batch_size()
        # train() counts the same when the step has returned.
        self.counters.update(
            iteration=iteration,
            consumed_train_samples=self._args.consumed_train_samples + batch,
            skipped_train_samples=self._args.skipped_train_samples + skipped,
        )
        lengths = dict(zip(per_entry_state.LENGTHS, self._newest.lengths, strict=False))
        operations = training.num_floating_point_operations(self._args, batch, **lengths)
        self._operations = self._newest.operations + operations
        self._reporter.step(iteration, answer, self.optimizer, self.counters)
        failpoints.hit("step.end")
        failpoints.set_context(section="between")
        return answer

    def _log(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        bound = bound_arguments(original, args, kwargs)
        iteration, sums = bound["iteration"], bound["total_loss_dict"]
        if self._sums is not sums:
            # train() was entered again, with empty sums.
            sums.update(self._newest.sums(current_device()))
            self._newest.restore_loss_sums()
            self._sums = sums
        if "is_first_iteration" in bound:
            # The first iteration of the run counts, not that of this entry into train(): in it
            # training_log() does not reset the sums.
            bound["is_first_iteration"] = iteration == self._first_iteration
        bound["skipped_iter"] = self._newest.skipped  # a replayed step may return another value
        failpoints.set_context(section="log")
        failpoints.hit("log.begin")
        runner, every = self._running, self._args.tensorboard_log_interval
        with self._logbook.lines("log", iteration, runner.check, runner.epoch):
            answer = original(**bound)
            shown = iteration % every == 0
            self._logbook.mark(runner.epoch, runner.recomputed, iteration, shown=shown)
        failpoints.hit("log.end")
        failpoints.set_context(section="between")
        return answer

    def _evaluate_at_the_end(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        is_test = bound_arguments(original, args, kwargs)["prefix"].endswith("test set")
        self._evaluate("test" if is_test else "validation", original, *args, **kwargs)

    def _evaluate(
        self, boundary: str, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> None:
        runner, iteration = self._running, self.counters["iteration"]

        def run() -> None:
            failpoints.hit("evaluation.begin")
            with self._logbook.lines(boundary, iteration, runner.check, runner.epoch):
                original(*args, **kwargs)
            self.counters["consumed_valid_samples"] = self._args.consumed_valid_samples
            failpoints.hit("evaluation.end")

        runner.segment(boundary, run)

    def _evaluate_once(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        answer = original(*args, **kwargs)
        self._reporter.evaluation(self.counters["iteration"], losses=answer[0])
        return answer

    def _save(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        bound = bound_arguments(original, args, kwargs)
        iteration, lasting = bound["iteration"], not bound.get("non_persistent_ckpt", False)
        write = functools.partial(
            self._saves.write,
            functools.partial(original, *args, **kwargs),
            iteration,
            lasting=lasting,
            is_last=lasting and iteration >= self._args.train_iters,
            may_be_lost=self._runner is not None,
            capture=bytes if self._runner is None else self._runner.capture_extras,
        )
        if self._runner is None or self._saves.owed:
            write()
        else:
            self._runner.segment("save", write)

    def _decide_exit(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        from megatron.training import training

        bound = bound_arguments(original, args, kwargs)
        self._newest.operations = bound["num_floating_point_operations_so_far"]
        if bound["iteration"] == self._passed and self._running.includes("save"):
            return False  # the previous run may have ended here, by --exit-interval
        if self._saves.owed:
            # An earlier save was interrupted, so it is made now.
            names = inspect.signature(training.save_checkpoint_and_time).parameters
            training.save_checkpoint_and_time(
                **{name: value for name, value in bound.items() if name in names}
            )
        return original(*args, **kwargs)

    # Helpers.

    @property
    def _running(self) -> StepRunner:
        assert self._runner is not None
        return self._runner

    def _announce(self, directory: Path, iteration: int, extras: bytes) -> None:
        if self._runner is not None:
            self._runner.count_as_durable(directory, iteration, extras)

    def _set_positions(self, positions: Mapping[str, Any]) -> None:
        for name in _POSITIONS:
            setattr(self._args, name, positions[name])

    def _positions(self) -> dict[str, int]:
        return {name: getattr(self._args, name) for name in _POSITIONS}

    def _abandon_saves(self) -> None:
        """Abandon a save that an exception has interrupted."""
        self.build.train_arguments["checkpointing_context"].clear()
        self._saves.abandon()


def loaded_checkpoint(args: Any, iteration: int) -> Path | None:
    """Return the checkpoint that was loaded whole, by Megatron's arguments, if any."""
    path = Path(str(args.load)).absolute() / f"iter_{iteration:07d}"
    is_part = args.finetune or args.no_load_optim or args.no_load_rng
    return path if path.is_dir() and not is_part else None


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    return None


def _faults_in_forward(forward_step: Callable[..., Any]) -> Callable[..., Any]:
    """Add the failpoint ``forward`` before each micro-batch, at which a test can make gradients
    NaN. It is added only once."""
    if not failpoints.ACTIVE or hasattr(forward_step, "__wrapped__"):
        return forward_step

    @functools.wraps(forward_step)
    def wrapper(iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        failpoints.maybe_corrupt_gradients(model.parameters(), "forward")
        return forward_step(iterator, model, *args, **kwargs)

    return wrapper
