"""Megatron's own checkpoints while a session trains: when one counts, and which is still owed; and
what save_checkpoint() would write, with marks for what an iteration changes.

An error of the file system while it saves costs that checkpoint, not the run. A save is a row of
collectives with file operations between them, nearly all of them on role 0. An error that leaves in
the middle takes role 0 out of the row, and the others wait for it. Here the operation is passed
over instead, every role goes through the whole row, and at its end all of them agree that what was
written does not count. In the older format (--ckpt-format torch) many roles write files of their
own, and role 0 the tracker when all have: there they agree before. Read with core_v0.16.1 open:
checkpointing.py (save_checkpoint), dist_checkpointing/serialization.py (save),
strategies/state_dict_saver.py.

A save is written as the user asked, and counts where it holds all that a resume needs
(:func:`lacking`). Exports are whole whatever the saves are like.

What a save would write is made by Megatron's own functions; only those that would communicate are
left out. No iteration of a generation is to be run again: of the rerun machine Megatron writes
nothing then, or since 0.18 the state of a machine that has nothing to do.
"""

from __future__ import annotations

import builtins
import contextlib
import copy
import importlib
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
from deadpool_megatron.state.template import (
    Attributes,
    FromExtras,
    RandomStates,
    TemplateError,
)
from deadpool_megatron.vault.disk import extras_file

_CHECKPOINTING = "megatron.core.dist_checkpointing"
_PROBE_BYTES = 4096
# Of Megatron's arguments, which are part of a checkpoint: counted by every iteration.
_COUNTED = ("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples")


class StorageFaults:
    """Errors of the save of this moment. ``tolerated``: whether it may be passed over."""

    def __init__(self) -> None:
        self.tolerated = False
        self._found = ""

    def begin(self, directory: Path) -> None:
        """Of a save that may be lost: role 0 tries whether ``directory`` can be written at all."""
        if dist.get_rank() != 0:
            return
        try:
            directory.mkdir(parents=True, exist_ok=True)
            check_checkpoint(directory)  # before anybody writes through a link of somebody else's
            for path in extras_file.files_in(directory):  # of an earlier save of this name
                path.unlink()
            with tempfile.NamedTemporaryFile(dir=directory) as probe:
                probe.write(bytes(_PROBE_BYTES))
                probe.flush()
                os.fsync(probe.fileno())
        except (OSError, OwnershipError) as error:
            self._note(error)

    def agree(self, device: torch.device) -> bool:
        """Returns whether something was passed over. Collective: role 0 knows of everything."""
        found = torch.tensor([bool(self._found)], dtype=torch.int32, device=device)
        dist.broadcast(found, src=0)
        return bool(found.item())

    def forget(self) -> str:
        """Returns what was found, and begins again."""
        found, self._found = self._found, ""
        return found

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Pass errors over while the block runs, in saves and in what finalises them later."""
        checkpointing = importlib.import_module("megatron.training.checkpointing")
        serialization = importlib.import_module(f"{_CHECKPOINTING}.serialization")
        writer = importlib.import_module(f"{_CHECKPOINTING}.strategies.filesystem_async")
        names: tuple[tuple[Any, str, Callable[..., Callable[..., Any]]], ...] = (
            (checkpointing, "cleanup_old_non_persistent_checkpoint", self._alone),
            (checkpointing, "ensure_directory_exists", self._alone),
            *((*place(named), self._alone) for named in family().common_saves),
            (writer.FileSystemWriterAsync, "finish", self._alone),
            (serialization, "save_config", self._alone),
            (*place(family().finalising), self._together),
            *((*place(named), self._opening) for named in family().openers),
            # It would say that the checkpoint was saved.
            (checkpointing, "print_rank_0", self._alone),
        )
        with contextlib.ExitStack() as stack:
            for holder, name, wrapped in names:
                stack.enter_context(replaced(holder, name, wrapped(_named(holder, name))))
            yield

    @contextlib.contextmanager
    def written_by_many(self) -> Iterator[None]:
        """Pass errors over in a save of the older format, and have all roles know of them before
        one writes the tracker: at the barrier to which they come when their files are there."""
        barrier = dist.barrier

        def agreed(*args: Any, **kwargs: Any) -> Any:
            found = [""] * dist.get_world_size()
            dist.all_gather_object(found, self._found)
            self._found = next(filter(None, found), "")
            return barrier(*args, **kwargs)

        saving = replaced(torch, "save", self._alone(torch.save))
        with saving, replaced(dist, "barrier", agreed):
            yield

    def _note(self, error: BaseException) -> None:
        self._found = self._found or f"{type(error).__name__}: {error}".replace("\n", " ")

    def _alone(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Of what a role does without its peers: nothing more once something is missing."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if not self.tolerated:
                return original(*args, **kwargs)
            if self._found:
                return None
            try:
                return original(*args, **kwargs)
            except (OSError, RuntimeError) as error:  # torch.save() raises the second
                self._note(error)

        return run

    def _together(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Of what all roles do: it raises on all of them when one could not write."""

        def run(*args: Any, **kwargs: Any) -> None:
            try:
                original(*args, **kwargs)
            except CheckpointException as error:
                if not self.tolerated:
                    raise
                # Of each role that could not write, with its traceback: the first says why.
                first = next(iter(error.failures.values()), (error, None))[0]
                self._note(first)

        return run

    def _opening(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Of open_file() for what role 0 writes at the end: the tracker, the log of progress."""

        def run(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if self.tolerated and mode in ("w", "a", "a+"):
                return self._noting(original, str(path), mode)
            if self.tolerated and self._found and str(path).endswith(".txt"):
                return io.StringIO("0")  # the tracker: no checkpoint before, so none is deleted
            return original(path, mode, *args, **kwargs)

        return run

    @contextlib.contextmanager
    def _noting(self, original: Callable[..., Any], path: str, mode: str) -> Iterator[Any]:
        # A tracker that could be written in part only would name no checkpoint.
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
    """Calls save_checkpoint() and tells when what it wrote can be fallen back to.

    With ``--async-save`` a checkpoint counts when it is finalised. ``unfinished`` is the iteration
    of one that is not (0: none); it travels with the state, so that after a recovery, which drops
    what was being written, all roles know that a checkpoint is owed.
    """

    def __init__(
        self, announce: Callable[[Path, int, bytes], None], report_lost: Callable[[Path, str], None]
    ) -> None:
        super().__init__()
        self.unfinished = 0
        # Of the moment of the newest lasting save, for when it is finalised.
        self._extras = b""
        self.owed = False
        #: iteration -> the checkpoint and why it could not be written, as role 0 knows
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
        """Write one checkpoint, or start to. Collective. ``lasting``: not one of those that
        Megatron keeps only until the next. ``is_last``: it is owed by whoever continues with the
        run if it is lost, as no other follows. ``may_be_lost``: an error of the file system costs
        it; else it ends this process. ``capture``: the extras that lie beside a lasting one."""
        from megatron.training import get_args

        self.look()
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
            # A state that continues from this checkpoint owes none.
            with replaced(self, "unfinished", 0):
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

    def look(self) -> None:
        """Notice that an asynchronous save is finalised. All roles see it at the same moment."""
        if self.unfinished and not self.owed and self._is_queue_empty():
            directory = checkpoint_directory(self.unfinished, lasting=True)
            if not self._is_lost(directory, self.unfinished):
                self._count(directory, self.unfinished)
            self.unfinished = 0

    def abandon(self) -> None:
        """After an interrupt: stop writers; what they were writing is owed."""
        self.forget()
        family().drop_saves()

    def restore(self, unfinished: int) -> None:
        """As the restored generation had it."""
        self.lost.clear()
        self._owe(unfinished)

    def _owe(self, iteration: int) -> None:
        self.unfinished, self.owed = iteration, iteration > 0

    def _count(self, directory: Path, iteration: int) -> None:
        from megatron.training import get_args

        why = lacking(get_args())
        if not why:
            self._announce(directory, iteration, self._extras)
        elif dist.get_rank() == 0 and not self._has_reported_lost:
            self._has_reported_lost = True
            self._report_lost(directory, f"{why}; exports do (--deadpool-persist-interval)")

    def _is_queue_empty(self) -> bool:
        from megatron.training import async_utils

        return bool(async_utils.is_empty_async_queue())

    def _is_lost(self, directory: Path, iteration: int) -> bool:
        """Return whether a checkpoint cannot count, told once. Collective."""
        if not self.tolerated or not self.agree(current_device()):
            return False
        why = self.forget()
        self.lost = {iteration: f"{directory}: {why}"}
        if dist.get_rank() == 0:
            self._report_lost(directory, f"it was not written: {why}")
        return True


def checkpoint_directory(iteration: int, lasting: bool) -> Path:
    """Return where Megatron writes a distributed checkpoint (checkpointing.py, save_checkpoint)."""
    from megatron.training import checkpointing, get_args

    args = get_args()
    base = Path(args.save)
    if not lasting:
        own = args.non_persistent_global_ckpt_dir
        base = Path(own) if own else base / checkpointing._NON_PERSISTENT_CKPT_SUBDIR
    return base.absolute() / f"iter_{iteration:07d}"


def lacking(args: Any) -> str:
    """Return why nobody falls back to what is saved with these arguments, nor to another one like
    it; empty where it holds all that a resume needs, and where each file has one writer."""
    if args.no_save_optim or args.no_save_rng:
        return "as requested, it lacks the optimizer or the random states"
    # By tensor-, pipeline- and expert-parallel rank (checkpointing.py, get_checkpoint_name).
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

    Whole, and of the format that exports have, whatever the user saves. Raises TemplateError for
    arguments with which a save communicates.
    """
    from megatron.training import checkpointing, get_args

    args = copy.copy(get_args())
    vars(args).update(ckpt_format="torch_dist", use_dist_ckpt=True)
    vars(args).update(no_save_optim=None, no_save_rng=None)  # as parsed where nobody says them
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
    """Megatron's arguments as they are once train() is under way."""
    from megatron.training import training

    later = copy.copy(args)
    # It completes the arguments with what they imply, in the first iteration.
    training.num_floating_point_operations(later, 1)
    later.num_floating_point_operations_so_far = float(args.num_floating_point_operations_so_far)
    counted = {name: FromExtras(("counters", name)) for name in _COUNTED}
    # train() sets it before it counts the iteration.
    current = FromExtras(("counters", "iteration"), plus=-1)
    return Attributes(later, {**counted, "curr_iteration": current})


def _named(place: Any, name: str) -> Callable[..., Any]:
    """Return what ``place`` calls by that name: a builtin, where it has none of its own."""
    found: Callable[..., Any] = getattr(place, name, None) or getattr(builtins, name)
    return found
