"""Errors of the file system while Megatron-LM saves: each costs that checkpoint, not the run.

A save is a row of collectives with file operations between them, nearly all of them on role 0. An
error that leaves in the middle takes role 0 out of the row, and the others wait for it. Here the
operation is passed over instead, every role goes through the whole row, and at its end all of them
agree that what was written does not count. Read with core_v0.16.1 open: checkpointing.py
(save_checkpoint), dist_checkpointing/serialization.py (save), strategies/state_dict_saver.py.
"""

from __future__ import annotations

import builtins
import contextlib
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
from torch.distributed.checkpoint.api import CheckpointException

from deadpool_megatron.hooks.pretraining.families import family, place
from deadpool_megatron.hooks.pretraining.scene import replaced
from deadpool_megatron.ownership import OwnershipError, check_checkpoint

_CHECKPOINTING = "megatron.core.dist_checkpointing"
_PROBE_BYTES = 4096


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

    def _note(self, error: BaseException) -> None:
        self._found = self._found or f"{type(error).__name__}: {error}".replace("\n", " ")

    def _alone(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Of what role 0 does without its peers: nothing more once something is missing."""

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
        if self._found:
            yield io.StringIO()
            return
        # A tracker that could be written in part only would name no checkpoint.
        written = f"{path}.{secrets.token_hex(4)}" if mode == "w" else path
        file = io.StringIO()
        try:
            file = original(written, mode)
        except OSError as error:
            self._note(error)
        try:
            with file:
                yield file
            if mode == "w" and not self._found:
                Path(written).replace(path)
        except OSError as error:
            self._note(error)


def _named(place: Any, name: str) -> Callable[..., Any]:
    """Return what ``place`` calls by that name: a builtin, where it has none of its own."""
    found: Callable[..., Any] = getattr(place, name, None) or getattr(builtins, name)
    return found
