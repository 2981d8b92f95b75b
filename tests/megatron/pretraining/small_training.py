"""Megatron-LM's training package, as small as the hooks allow: calls of its functions are recorded,
and each of them may fail.

The functions are those of 0.16.1 with the same names, parameters and calls of each other; the core
beneath them is the real one.
"""

import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megatron.core.dist_checkpointing.strategies.torch  # noqa: F401  with its imports
import pytest
import torch
import torch.distributed as dist
from megatron.core import (
    num_microbatches_calculator as microbatches,
    optimizer as core_optimizer,
    parallel_state,
)
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.optimizer import FP32Optimizer

from deadpool_megatron.hookpoints import POINTS, hookpoint
from deadpool_megatron.megatron.pretraining import training_loop
from tests.megatron.plain_loop import schedule
from tests.megatron.pretraining.places import config

_PLACES = "iteration curr_iteration consumed_train_samples consumed_valid_samples"
_LOADED = """ckpt_step ckpt_format exit_on_missing_checkpoint finetune no_load_optim no_load_rng
 no_save_optim no_save_rng load"""
_MODULES = "training checkpointing arguments initialize global_vars async_utils"
_ARGUMENTS = Path(__file__).parent / "lives" / "arguments.json"
# The values of a saved schedule.
_SAVED = {"num_steps": 4, "start_wd": 0.25, "end_wd": 0.5}
OPTIMIZER = OptimizerConfig(lr=0.5)


class Chunk(torch.nn.Module):
    """The layers of one stage, and what DDP keeps of them."""

    def __init__(self, config: Any, first: int, count: int) -> None:
        super().__init__()
        self.config = config
        self.layers = torch.nn.ModuleList(torch.nn.Linear(2, 1, bias=False) for _ in range(count))
        for number, layer in enumerate(self.layers):
            layer.layer_number = first + number
            torch.nn.init.constant_(layer.weight, first + number)
        group = parallel_state.get_data_parallel_group()
        self.bucket_groups = [SimpleNamespace(intra_distributed_optimizer_instance_group=group)]
        self.expert_parallel_bucket_groups: list[Any] = []
        self.remove_forward_pre_hook_handles: dict[str, str] = {}


class Samples(list[int]):
    """A data set with the mask of losses that Megatron keeps for all of its samples."""

    masks_and_position_ids_are_cacheable = True
    cached_loss_mask = torch.zeros(2)


class Queue:
    """Asynchronous saves under way."""

    def __init__(self, persistent: bool = False) -> None:
        self.persistent = persistent
        self.async_calls: list[Any] = []


class SmallTraining:
    """See the module text. ``acts``: by the name of a function and an iteration, an act in
    place of the rest; each once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, **given: Any) -> None:
        self.lines: list[str] = []
        self.acts: dict[str, Callable[[], Any]] = {}
        self.given = {**json.loads(_ARGUMENTS.read_text()), "save": str(folder / "saves"), **given}
        self.folder = folder
        monkeypatch.setitem(sys.modules, "megatron.training", self)
        for name in _MODULES.split():
            monkeypatch.setitem(sys.modules, f"megatron.training.{name}", self)
            setattr(self, name, self)
        self.CachedMetadataFileSystemReader = self
        for name in ("torch.utils.tensorboard", training_loop.METADATA_READER):
            monkeypatch.setitem(sys.modules, name, self)
        utils = SimpleNamespace(open_file=self.open_file)
        monkeypatch.setitem(sys.modules, "megatron.training.utils", utils)
        monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", "--deadpool"])
        for point in POINTS:
            if function := getattr(self, point.function, None):
                setattr(self, point.function, hookpoint(function))
        self.unset_global_variables()
        self._async_calls_queue = Queue()
        self._NON_PERSISTENT_CKPT_SUBDIR = "passing"

    def note(self, name: str, number: Any = "", **facts: Any) -> None:
        """Write a call down, and do what is to be done in it."""
        text = " ".join(f"{key}={_plain(value)}" for key, value in facts.items())
        line = f"{name} {number}".strip()
        self.lines.append(f"{line} {text}".strip().replace(str(self.folder), "DIR"))
        self.acts.pop(line, lambda: None)()

    def places(self) -> dict[str, Any]:
        args = self.get_args()
        return {name: getattr(args, name) for name in _PLACES.split()}

    # megatron.training.global_vars, arguments and initialize

    def get_args(self) -> Any:
        return self._GLOBAL_ARGS

    def get_timers(self) -> str:
        return "timers"

    def set_args(self, args: Any) -> None:
        self._GLOBAL_ARGS = args

    def unset_global_variables(self) -> None:
        self._GLOBAL_ARGS = self._GLOBAL_TENSORBOARD_WRITER = self._GLOBAL_WANDB_WRITER = None
        microbatches.unset_num_microbatches_calculator()

    def set_global_variables(self, args: Any) -> None:
        self.set_args(args)
        microbatches.init_num_microbatches_calculator(
            args.rank, None, args.global_batch_size, args.micro_batch_size, 1, False
        )
        self._set_tensorboard_writer(args)
        self._set_wandb_writer(args)

    def _set_tensorboard_writer(self, args: Any) -> None:
        self.note("a writer that Megatron has opened", dir=args.tensorboard_dir)

    def _set_wandb_writer(self, args: Any) -> None:
        writes = {
            "log": lambda values, iteration: self.note("wandb", iteration, **values),
            "finish": lambda: self.note("wandb is finished"),
        }
        self._GLOBAL_WANDB_WRITER = SimpleNamespace(**writes)
        self.note("wandb.init", rank=args.rank)

    def SummaryWriter(self, **given: Any) -> Any:
        events = SimpleNamespace(add_event=lambda line: self.note("event", line=line))
        self.note("SummaryWriter", **given)
        return SimpleNamespace(
            file_writer=SimpleNamespace(event_writer=events),
            add_scalar=lambda *given: events.add_event(" ".join(map(str, given))),
            flush=lambda: self.note("flush"),
        )

    def validate_args(self, args: Any) -> None:
        self.note("validate_args", args.rank)

    def core_transformer_config_from_args(self, args: Any) -> Any:
        return config(args, args.num_layers)

    def initialize_megatron(self) -> None:
        size = {name: int(os.environ[name.upper()]) for name in ("rank", "world_size")}
        self.note("initialize_megatron", **size, parsed=self.get_args() is not None)
        args = SimpleNamespace(**{**self.given, **size})
        self.validate_args(args)
        self.set_global_variables(args)
        print("parsed")
        ranks = {"get_embedding_ranks": "words", "get_position_embedding_ranks": "positions"}
        self._initialize_distributed(**ranks, store=None)

    def _initialize_distributed(
        self, get_embedding_ranks: Any, get_position_embedding_ranks: Any, store: Any
    ) -> None:
        args = self.get_args()
        asked = get_embedding_ranks, get_position_embedding_ranks
        self.note("_initialize_distributed", args.rank, asked=asked, store=store)
        if not dist.is_initialized():
            found = {"rank": args.rank, "world_size": args.world_size}
            dist.init_process_group("gloo", store=dist.HashStore(), **found)
        if not parallel_state.model_parallel_is_initialized():
            sizes = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
            parallel_state.initialize_model_parallel(*sizes)

    def _initialize_tp_communicators(self) -> None:
        self.note("user buffers")

    def set_jit_fusion_options(self) -> None:
        self.note("set_jit_fusion_options")

    # megatron.training.training

    def script(self, provider: Any, model_provider: Any, forward_step: Any) -> None:
        self.initialize_megatron()
        self.set_jit_fusion_options()
        self.append_to_progress_log("Starting job")
        args, context = self.get_args(), {"of": "one pass"}
        objects = self.setup_model_and_optimizer(model_provider, checkpointing_context=context)
        config = objects[0][0].config
        iterators = self.build_train_valid_test_data_iterators(provider)
        print("done with setup")
        given = (*objects, *iterators[:2], config, context)
        iteration, _ = self.train(forward_step, *given)
        print("after training is done")
        if iteration and iteration % args.save_interval:
            self.save_checkpoint(iteration, context)
        for kind, iterator in zip(("validation", "test"), iterators[1:], strict=True):
            prefix = f"iteration {iteration} on {kind} set"
            self.evaluate_and_print_results(prefix, iterator, iteration)

    def setup_model_and_optimizer(self, model_provider_func: Any, **more: Any) -> Any:
        args = self.get_args()
        self.note("setup_model_and_optimizer", args.rank, train_iters=args.train_iters)
        args.train_iters = args.train_iters or 9
        model = self.get_model(model_provider_func)
        groups = core_optimizer._get_param_groups(model, OPTIMIZER, {})  # type: ignore[attr-defined]
        rated = [{**group, "max_lr": 0.5, "min_lr": 0.0} for group in groups]
        optimizer = FP32Optimizer(torch.optim.SGD(rated, lr=0.5), OPTIMIZER, None)
        scheduler = schedule(optimizer, lr_decay_style="linear")
        if args.load:
            found = self.load_checkpoint(model, optimizer, scheduler)
            args.iteration, args.num_floating_point_operations_so_far = found
        return model, optimizer, scheduler

    def get_model(self, provider: Callable[[], Any]) -> list[Any]:
        self.note("get_model")
        return [provider()]

    def append_to_progress_log(self, text: str) -> None:
        self.note("progress", text=text)

    def num_floating_point_operations(self, args: Any, batch_size: int, *sums: Any) -> float:
        return 100.0 * batch_size * args.seq_length

    def destroy_global_state(self) -> None:
        self.note("destroy_global_state")
        self.unset_global_variables()
        parallel_state.destroy_model_parallel()

    def build_train_valid_test_datasets(self, provider: Any) -> Any:
        self.note("build_train_valid_test_datasets")
        return provider([40, 32, 8])

    def build_pretraining_data_loader(self, dataset: Any, consumed_samples: int) -> Any:
        self.note("loader", of=len(dataset), consumed=consumed_samples)
        assert consumed_samples < len(dataset)
        return dataset[consumed_samples:]

    def build_train_valid_test_data_iterators(self, provider: Any) -> Any:
        args = self.get_args()
        sets = self.build_train_valid_test_datasets(provider)
        begins = args.consumed_train_samples, args.consumed_valid_samples, 0
        loaders = map(self.build_pretraining_data_loader, sets, begins)
        made = [SimpleNamespace(iterable=iter(batches)) for batches in loaders]
        if dist.get_rank() == 0:
            args.do_train = args.do_valid = args.do_test = True
        mask = float(Samples.cached_loss_mask.sum())
        self.note("iterators", flags=(args.do_train, args.do_valid, args.do_test), mask=mask)
        return tuple(made)

    def train(
        self,
        forward_step_func: Any,
        model: Any,
        optimizer: Any,
        opt_param_scheduler: Any,
        train_data_iterator: Any,
        valid_data_iterator: Any,
        config: Any,
        checkpointing_context: Any,
    ) -> Any:
        args = self.get_args()
        totals: dict[str, Any] = {}
        iteration, operations = args.iteration, args.num_floating_point_operations_so_far
        timers, before = getattr(config, "timers", None), (args.profile, operations)
        self.note("train", **self.places(), before=before, timers=timers)
        first = True
        while iteration < args.train_iters:
            self.maybe_finalize_async_save()
            microbatches.update_num_microbatches(args.consumed_train_samples)
            args.curr_iteration = iteration
            passes = functools.partial(forward_step_func, train_data_iterator.iterable, model[0])
            answer = self.train_step(opt_param_scheduler, passes, iteration)
            self.lines.append(f"    step answers {_plain(answer)} {self.places()}")
            if answer[2]:
                self.save_checkpoint_and_time(iteration, operations, checkpointing_context)
            if answer[3]:
                sys.exit(answer[4])
            iteration += 1
            batch = args.micro_batch_size * microbatches.get_num_microbatches()
            args.consumed_train_samples += batch
            operations += self.num_floating_point_operations(args, batch)
            self.training_log(answer[0], totals, iteration, True, answer[1], first)
            first = False
            if iteration % args.eval_interval == 0 and args.do_valid:
                prefix = f"iteration {iteration}"
                self.evaluate_and_print_results(prefix, valid_data_iterator, iteration)
            if self.checkpoint_and_decide_exit(iteration, operations, checkpointing_context):
                sys.exit()
        return iteration, operations

    def train_step(self, scheduler: Any, forward_backward_func: Any, iteration: int) -> Any:
        self.note("train_step", iteration + 1)
        sample = forward_backward_func()
        scheduler.step(increment=1)
        exits, skips = (f"{name} {iteration + 1}" in self.acts for name in ("exits", "skips"))
        losses = {"lm loss": torch.tensor(float(sample))}
        return losses, int(skips), exits, exits, 7 * exits, None if skips else 0.5, 0, 0

    def training_log(
        self,
        loss_dict: Any,
        total_loss_dict: Any,
        iteration: int,
        report_memory_flag: bool,
        skipped_iter: int,
        is_first_iteration: bool,
    ) -> bool:
        found = {"sums": dict(total_loss_dict), "first": is_first_iteration}
        self.note("training_log", iteration, skipped=skipped_iter, **found)
        before = total_loss_dict.get("lm loss", 0.0)
        total_loss_dict["lm loss"] = before + loss_dict["lm loss"]
        if iteration % self.get_args().log_interval == 0:
            print(f"iteration {iteration} lm loss {total_loss_dict.pop('lm loss')}")
        self._write("lm loss", loss_dict["lm loss"], iteration)
        return False

    def _write(self, tag: str, value: Any, iteration: int) -> None:
        if self._GLOBAL_TENSORBOARD_WRITER is not None:
            self._GLOBAL_TENSORBOARD_WRITER.add_scalar(tag, float(value), iteration)
        if self._GLOBAL_WANDB_WRITER is not None:
            self._GLOBAL_WANDB_WRITER.log({tag: float(value)}, iteration)

    def evaluate(self, data_iterator: Any) -> Any:
        args = self.get_args()
        args.consumed_valid_samples += args.global_batch_size
        return {"lm loss": torch.tensor(float(next(data_iterator.iterable)))}, None, False

    def evaluate_and_print_results(self, prefix: str, iterator: Any, iteration: int) -> None:
        self.note("evaluate", iteration, prefix=repr(prefix), **self.places())
        losses, _, _ = self.evaluate(iterator)
        print(f"validation loss at {prefix}: {losses['lm loss']}")
        self._write("validation loss", losses["lm loss"], iteration)

    def checkpoint_and_decide_exit(
        self,
        iteration: int,
        num_floating_point_operations_so_far: float,
        checkpointing_context: Any,
    ) -> bool:
        args, operations = self.get_args(), num_floating_point_operations_so_far
        self.note("decide", iteration, operations=operations)
        if iteration % args.save_interval == 0:
            self.save_checkpoint_and_time(iteration, operations, checkpointing_context)
        elif iteration % (args.non_persistent_save_interval or sys.maxsize) == 0:
            self.save_checkpoint_and_time(iteration, operations, checkpointing_context, True)
        return bool(args.exit_interval and iteration % args.exit_interval == 0)

    def save_checkpoint_and_time(
        self,
        iteration: int,
        num_floating_point_operations_so_far: float,
        checkpointing_context: Any,
        non_persistent_ckpt: bool = False,
    ) -> None:
        self.note("save", iteration, operations=num_floating_point_operations_so_far)
        self.save_checkpoint(iteration, checkpointing_context, non_persistent_ckpt)

    # megatron.training.checkpointing and async_utils

    def save_checkpoint(
        self, iteration: int, checkpointing_context: Any, non_persistent_ckpt: bool = False
    ) -> None:
        args = self.get_args()
        found = {"passing": non_persistent_ckpt, "context": sorted(checkpointing_context)}
        self.note("save_checkpoint", iteration, **found)
        checkpointing_context["kept"] = iteration
        base = Path(args.save) / ("passing" if non_persistent_ckpt else "")
        self.ensure_directory_exists(base / f"iter_{iteration:07d}")
        dist.barrier()
        if args.ckpt_format == "torch":
            torch.save({}, base / f"iter_{iteration:07d}" / "model.pt")
        dist.barrier()
        if args.async_save:
            closes = SimpleNamespace(close=lambda abort: self.note("aborted", iteration, by=abort))
            call = SimpleNamespace(async_caller=closes, iteration=iteration, base=base, ends=False)
            self._async_calls_queue.async_calls.append(call)
        else:
            self.finalize(iteration, base)

    def finalize(self, iteration: int, base: Path) -> None:
        with self.open_file(base / "latest_checkpointed_iteration.txt", "w") as tracker:
            tracker.write(str(iteration))
            self.note("tracker", iteration)
        self.print_rank_0(f"saved {iteration}")

    def maybe_finalize_async_save(self) -> None:
        queue = self._async_calls_queue
        while queue.async_calls and queue.async_calls[0].ends:
            call = queue.async_calls.pop(0)
            self.finalize(call.iteration, call.base)

    def is_empty_async_queue(self) -> bool:
        return not self._async_calls_queue.async_calls

    def ensure_directory_exists(self, directory: Path) -> None:
        self.note("directory", directory.name)
        directory.mkdir(parents=True, exist_ok=True)

    def cleanup_old_non_persistent_checkpoint(self) -> None:
        """None is there."""

    def open_file(self, path: Any, mode: str = "r") -> Any:
        self.note("open", Path(path).name.split(".")[0], mode=mode)
        return Path(path).open(mode)

    def print_rank_0(self, text: str) -> None:
        print(text)

    def clear_metadata_cache(self) -> None:
        self.note("forgets what it has read")

    def read_metadata(self, tracker: Any) -> tuple[int, bool]:
        return 99, False

    def load_checkpoint(
        self, ddp_model: Any, optimizer: Any, opt_param_scheduler: Any, **more: Any
    ) -> tuple[int, float]:
        args = self.get_args()
        asked = {name: getattr(args, name) for name in (*_LOADED.split(), *_PLACES.split())}
        tracked = self.read_metadata("tracker")
        self.note("load_checkpoint", tracked=tracked, **asked)
        opt_param_scheduler.load_state_dict({**opt_param_scheduler.state_dict(), **_SAVED})
        args.consumed_train_samples += 16
        return 4, 12800.0

    # megatron.training.checkpointing, of a state that is saved

    def generate_state_dict(self, args: Any, *given: Any, **more: Any) -> dict[str, Any]:
        self.note("generate_state_dict", format=args.ckpt_format, whole=args.no_save_optim, **more)
        return {"opt_param_scheduler": given[2].state_dict(), "rng_state": given[3]}

    def get_rng_state(self, *given: Any) -> Any:
        return SimpleNamespace(data=["own"])

    def unwrap_model(self, model: Any) -> Any:
        return model

    def _build_sharded_state_dict_metadata(self, args: Any) -> dict[str, Any]:
        return {"of": args.ckpt_format, "dist": args.use_dist_ckpt}

    def _clean_metadata_for_serialization(self, metadata: Any) -> Any:
        return {**metadata, "clean": True}


def samples(sizes: list[int]) -> list[Samples]:
    """Data sets of whole numbers."""
    return [Samples(range(size)) for size in sizes]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return value.tolist() if isinstance(value, torch.Tensor) else value
