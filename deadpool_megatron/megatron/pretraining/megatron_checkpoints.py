"""Megatron's own checkpoints while a session trains: which count, which are owed, and the content
of save_checkpoint(), with marks for the values that an iteration changes.

An error of the file system in a save costs that checkpoint, not the run. A save is a row of
collectives with file operations between them, nearly all of which are on role 0. An error in the
middle would take role 0 out of the row, and the other roles would wait for it. Here the operation
is skipped instead, every role runs the whole row, and at its end all roles agree that the
checkpoint does not count. In the older format (--ckpt-format torch) many roles write files of their
own before role 0 writes the tracker, so there the roles agree before the tracker. The sources are
those of core_v0.16.1: checkpointing.py (save_checkpoint), dist_checkpointing/serialization.py
(save), strategies/state_dict_saver.py.

A save is written as the user requests it, and counts if it holds all state that a resume needs
(:func:`unusable_reason`). Exports hold all state, whatever the saves hold.

Megatron's own functions make the content of a save; only those that would communicate are left out.
A generation has no iteration that has to be rerun: Megatron writes no state of an idle rerun
machine, or since 0.18 an idle state.
"""

from __future__ import annotations

import builtins
import contextlib
import copy
import io
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed.checkpoint.api import CheckpointException

from deadpool_megatron import failpoints
from deadpool_megatron.megatron.pretraining.families import family, place
from deadpool_megatron.megatron.replacement import replaced
from deadpool_megatron.member.peer_comparison import current_device
from deadpool_megatron.ownership import OwnershipError, check_checkpoint
from deadpool_megatron.state.template import Attributes, FromExtras, RandomStates, TemplateError
from deadpool_megatron.vault.disk import extras_file

# Functions that a role runs without its peers; the last prints that the checkpoint was saved.
_ALONE = (
    "megatron.training.checkpointing:cleanup_old_non_persistent_checkpoint",
    "megatron.training.checkpointing:ensure_directory_exists",
    "megatron.core.dist_checkpointing.strategies.filesystem_async:FileSystemWriterAsync.finish",
    "megatron.core.dist_checkpointing.serialization:save_config",
    "megatron.training.checkpointing:print_rank_0",
)
_PROBE_BYTES = 4096
# Megatron's arguments, which are part of a checkpoint, that every iteration advances.
_COUNTED = ("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples")


class StorageFaults:
    """Errors of the present save. ``tolerated``: whether its operations may be skipped."""

    def __init__(self) -> None:
        self.tolerated = False
        self._found = ""

    def begin(self, directory: Path) -> None:
        """Begin a save that may be lost: role 0 checks whether ``directory`` can be written."""
        if dist.get_rank() != 0:
            return
        try:
            directory.mkdir(parents=True, exist_ok=True)
            check_checkpoint(directory)  # before a write follows a link of another user
            for path in extras_file.files_in(directory):  # left by an earlier save of this name
                path.unlink()
            with tempfile.NamedTemporaryFile(dir=directory) as probe:
                probe.write(bytes(_PROBE_BYTES))
                probe.flush()
                os.fsync(probe.fileno())
        except (OSError, OwnershipError) as error:
            self._note(error)

    def agree(self, device: torch.device) -> bool:
        """Return whether an operation was skipped. Collective: role 0 knows all errors."""
        found = torch.tensor([bool(self._found)], dtype=torch.int32, device=device)
        dist.broadcast(found, src=0)
        return bool(found.item())

    def forget(self) -> str:
        """Return the first error, and forget it."""
        found, self._found = self._found, ""
        return found

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """In the block, skip operations of saves and of their later finalisation after an error."""
        wrappers = {
            **dict.fromkeys((*_ALONE, *family().common_saves), self._alone),
            **dict.fromkeys(family().openers, self._opening),
            family().finalising: self._together,
        }
        with contextlib.ExitStack() as stack:
            for named, wrapper in wrappers.items():
                holder, name = place(named)
                original = getattr(holder, name, None) or getattr(builtins, name)
                stack.enter_context(replaced(holder, **{name: wrapper(original)}))
            yield

    @contextlib.contextmanager
    def written_by_many(self) -> Iterator[None]:
        """Skip operations after an error in a save of the older format, and share the error among
        all roles before the tracker is written: at the barrier that follows their files."""
        barrier = dist.barrier

        def agreed(*args: Any, **kwargs: Any) -> Any:
            found = [""] * dist.get_world_size()
            dist.all_gather_object(found, self._found)
            self._found = next(filter(None, found), "")
            return barrier(*args, **kwargs)

        saving = replaced(torch, save=self._alone(torch.save))
        with saving, replaced(dist, barrier=agreed):
            yield

    def _note(self, error: BaseException) -> None:
        self._found = self._found or f"{type(error).__name__}: {error}".replace("\n", " ")

    def _alone(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function that a role runs without its peers: skip it after an error."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if not self.tolerated:
                return original(*args, **kwargs)
            if self._found:
                return None
            try:
                return original(*args, **kwargs)
            except (OSError, RuntimeError) as error:  # torch.save() raises RuntimeError
                self._note(error)

        return run

    def _together(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function of all roles, which raises on all roles if one role could not write."""

        def run(*args: Any, **kwargs: Any) -> None:
            try:
                original(*args, **kwargs)
            except CheckpointException as error:
                if not self.tolerated:
                    raise
                # The error has the failures of all roles, with tracebacks: the first is the reason.
                first = next(iter(error.failures.values()), (error, None))[0]
                self._note(first)

        return run

    def _opening(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap open_file() for the last files of role 0: the tracker, the log of progress."""

        def run(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if self.tolerated and mode in ("w", "a", "a+"):
                return self._noting(original, str(path), mode)
            if self.tolerated and self._found and str(path).endswith(".txt"):
                return io.StringIO("0")  # the tracker names no checkpoint, so none is deleted
            return original(path, mode, *args, **kwargs)

        return run

    @contextlib.contextmanager
    def _noting(self, original: Callable[..., Any], path: str, mode: str) -> Iterator[Any]:
        # A tracker that was written in part would name no checkpoint.
        written = f"{path}.{secrets.token_hex(4)}" if mode == "w" else path
        try:
            file: Any = None if self._found else original(written, mode)
        except OSError as error:
            self._note(error)
        if self._found:
            yield io.StringIO()
            return
        try:
            with file:
                yield file
            if mode == "w":
                Path(written).replace(path)
        except OSError as error:
            self._note(error)


class Saves(StorageFaults):
    """Calls save_checkpoint() and announces when a recovery can fall back to the checkpoint.

    With ``--async-save`` a checkpoint counts when it is finalised. ``unfinished`` is the iteration
    of an unfinished save (0: none); it travels with the state, so that after a recovery, which
    drops such saves, all roles know that a checkpoint is owed.
    """

    def __init__(
        self, announce: Callable[[Path, int, bytes], None], report_lost: Callable[[Path, str], None]
    ) -> None:
        super().__init__()
        self.unfinished = 0
        # The extras at the newest lasting save, kept until that save is finalised.
        self._extras = b""
        self.owed = False
        #: iteration -> the checkpoint and the reason why it was not written, as role 0 knows
        self.lost: dict[int, str] = {}
        self._announce = announce
        self._report_lost = report_lost
        self._has_reported_lost = False

    def write(
        self,
        original: Callable[[], Any],
        iteration: int,
        *,
        lasting: bool,
        is_last: bool,
        may_be_lost: bool,
        capture: Callable[[], bytes],
    ) -> None:
        """Write a checkpoint, or start to. Collective.

        ``lasting``: Megatron keeps the checkpoint after the next save. ``is_last``: if it is lost,
        the run still owes it, since no other checkpoint follows. ``may_be_lost``: an error of the
        file system costs the checkpoint; otherwise it ends this process. ``capture`` returns the
        extras to store with a lasting checkpoint.
        """
        from megatron.training import get_args

        self.poll()
        directory = checkpoint_directory(iteration, lasting)
        failpoints.hit("save.begin")
        if self.owed:
            self._owe(0)
        self.tolerated = may_be_lost
        if may_be_lost and self._is_queue_empty():
            self.begin(directory)
            if self._is_lost(directory, iteration):
                self._owe(iteration if is_last else 0)
                return
        if lasting:
            # A run that continues from this checkpoint owes no checkpoint.
            with replaced(self, unfinished=0):
                self._extras = capture()
        is_older = get_args().ckpt_format == "torch"
        with self.written_by_many() if is_older else contextlib.nullcontext():
            original()
        failpoints.hit("save.written")
        if get_args().async_save:
            self.unfinished = iteration if lasting else self.unfinished
        elif self._is_lost(directory, iteration):
            self._owe(iteration if is_last else 0)
        elif lasting:
            self._count(directory, iteration)

    def poll(self) -> None:
        """Check whether an asynchronous save is finalised. It is in the same call on all roles."""
        if self.unfinished and not self.owed and self._is_queue_empty():
            directory = checkpoint_directory(self.unfinished, lasting=True)
            if not self._is_lost(directory, self.unfinished):
                self._count(directory, self.unfinished)
            self.unfinished = 0

    def abandon(self) -> None:
        """Stop the writers after an interrupt; their checkpoints are owed."""
        self.forget()
        family().drop_saves()

    def restore(self, unfinished: int) -> None:
        """Restore :attr:`unfinished` of a generation."""
        self.lost.clear()
        self._owe(unfinished)

    def _owe(self, iteration: int) -> None:
        self.unfinished, self.owed = iteration, iteration > 0

    def _count(self, directory: Path, iteration: int) -> None:
        from megatron.training import get_args

        reason = unusable_reason(get_args())
        if not reason:
            self._announce(directory, iteration, self._extras)
        elif dist.get_rank() == 0 and not self._has_reported_lost:
            self._has_reported_lost = True
            self._report_lost(directory, f"{reason}; exports do (--deadpool-persist-interval)")

    def _is_queue_empty(self) -> bool:
        from megatron.training import async_utils

        return bool(async_utils.is_empty_async_queue())

    def _is_lost(self, directory: Path, iteration: int) -> bool:
        """Return whether a checkpoint cannot count, and report it once. Collective."""
        if not self.tolerated or not self.agree(current_device()):
            return False
        reason = self.forget()
        self.lost = {iteration: f"{directory}: {reason}"}
        if dist.get_rank() == 0:
            self._report_lost(directory, f"it was not written: {reason}")
        return True


def checkpoint_directory(iteration: int, lasting: bool) -> Path:
    """Return the path at which Megatron writes a distributed checkpoint (checkpointing.py,
    save_checkpoint)."""
    from megatron.training import checkpointing, get_args

    args = get_args()
    base = Path(args.save)
    if not lasting:
        own = args.non_persistent_global_ckpt_dir
        base = Path(own) if own else base / checkpointing._NON_PERSISTENT_CKPT_SUBDIR
    return base.absolute() / f"iter_{iteration:07d}"


def unusable_reason(args: Any) -> str:
    """Return the reason why a recovery cannot fall back to saves with these arguments; empty if a
    save has all state that a resume needs, and each file has a single writer."""
    if args.no_save_optim or args.no_save_rng:
        return "as requested, it lacks the optimizer or the random states"
    # The format "torch" names files by tensor-, pipeline- and expert-parallel rank
    # (checkpointing.py, get_checkpoint_name).
    expert_ranks = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    is_shared = (
        args.context_parallel_size > 1
        or args.num_distributed_optimizer_instances > 1
        or (args.num_experts and expert_ranks != args.tensor_model_parallel_size)
    )
    if args.ckpt_format == "torch" and is_shared:
        return "in this format several processes write the same files"
    if args.ckpt_format == "torch" and (args.optimizer != "adam" or args.fp8_param_gather):
        return "loading this state from this format has not been tested"
    return ""


def saved_state(objects: tuple[Any, ...]) -> dict[str, Any]:
    """See :meth:`ProtectedLoop.checkpoint_state`; ``objects``: model chunks, optimizer, scheduler.

    The state is whole, and in the format of exports, whatever the user saves. Raises TemplateError
    for arguments with which a save communicates.
    """
    from megatron.training import checkpointing, get_args

    args = copy.copy(get_args())
    vars(args).update(ckpt_format="torch_dist", use_dist_ckpt=True)
    vars(args).update(no_save_optim=None, no_save_rng=None)  # as parsed without the flags
    if args.data_parallel_random_init:
        raise TemplateError("--data-parallel-random-init: random states would have to be gathered")
    model, optimizer, scheduler = objects
    metadata = checkpointing._build_sharded_state_dict_metadata(args)
    random_states = checkpointing.get_rng_state(
        args.ckpt_format,
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
    )
    random_states.data = [RandomStates()]
    state: dict[str, Any] = checkpointing.generate_state_dict(
        args,
        checkpointing.unwrap_model(model),
        optimizer,
        scheduler,
        random_states,
        iteration=0,
        optim_sd_kwargs={"metadata": metadata},
        model_sd_kwargs={"metadata": metadata},
        rerun_state=_idle_machine(args),
    )
    state["args"] = _arguments(args)
    state["iteration"] = FromExtras(("counters", "iteration"))
    state["num_floating_point_operations_so_far"] = FromExtras(("extra_state", "operations"))
    if "opt_param_scheduler" in state:
        marks = {name: FromExtras(("schedule", name)) for name in state["opt_param_scheduler"]}
        state["opt_param_scheduler"] = marks
    state["content_metadata"] = checkpointing._clean_metadata_for_serialization(metadata)
    return state


def _idle_machine(args: Any) -> dict[str, Any] | None:
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    state: dict[str, Any] | None = get_rerun_state_machine().state_dict(None, args.ckpt_format)
    if state is not None:
        state["current_iteration"] = FromExtras(("counters", "iteration"))
    return state


def _arguments(args: Any) -> Attributes:
    """Return Megatron's arguments as they are while train() runs."""
    from megatron.training import training

    later = copy.copy(args)
    # This call completes the arguments with implied values, as in the first iteration.
    training.num_floating_point_operations(later, 1)
    later.num_floating_point_operations_so_far = float(args.num_floating_point_operations_so_far)
    counters = {name: FromExtras(("counters", name)) for name in _COUNTED}
    # train() sets curr_iteration before it counts the iteration.
    current = FromExtras(("counters", "iteration"), plus=-1)
    return Attributes(later, {**counters, "curr_iteration": current})
