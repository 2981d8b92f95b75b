"""Frozen weights too large for the extras: protected once, by a file in the run directory.

No iteration changes them, so each generation only names the file
(:mod:`deadpool_megatron.state.frozen_file`), which a process reads when it takes the role. The
version counters of torch's tensors, and a fingerprint at each restore, show changes: a program that
changes frozen weights could not be restored exactly, so it ends.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from torch import Tensor

from deadpool_megatron.state import frozen_file
from deadpool_megatron.state.optimizer_state import UnsupportedState
from deadpool_megatron.state.parts import fingerprint
from deadpool_megatron.vault.errors import OutOfSpace

#: limit for a role: up to this size frozen weights are copied and sent with each generation, above
#: it they are written once
MAX_FROZEN_BYTES = 64 << 20


def are_large(weights: Iterable[Tensor]) -> bool:
    """Return whether the frozen weights of a role are above the limit."""
    return sum(tensor.nbytes for tensor in weights) > MAX_FROZEN_BYTES


class FrozenWeights:
    """Large frozen ``weights`` of one role in one process, by name. Main thread."""

    def __init__(self, weights: Sequence[tuple[str, Tensor]], folder: Path) -> None:
        self._weights = weights
        self._tensors = [tensor for _, tensor in weights]
        self._folder = folder
        self._name = ""
        self._version = 0
        self._fingerprint: list[int] = []

    def name(self) -> str:
        """Return the name of the file that holds the weights, for the extras; empty before
        :meth:`write`.

        Raises UnsupportedState if the weights have changed.
        """
        if self._name and self._version != self._count_versions():
            self._refuse_changes()
        return self._name

    def forget(self) -> None:
        """Forget the file: a checkpoint may be about to replace the weights."""
        self._name = ""

    def write(self, wait: frozen_file.Wait) -> None:
        """Write the weights to a file before a generation names it.

        Raises the errors of ``wait``, OutOfSpace where the weights cannot be written, and
        UnsupportedState if they have changed.
        """
        started = time.monotonic()
        name = self.name() or frozen_file.name_of(self._weights, wait)
        try:
            frozen_file.write(self._folder, name, self._weights, wait)
        except OSError as error:
            raise OutOfSpace(
                f"{frozen_file.size_of(self._weights)} bytes of frozen weights cannot be written to"
                f" {self._folder}: {error.strerror or error}; make room there, or give a --run-dir"
                " on other storage"
            ) from error
        self._remember(name)
        seconds = time.monotonic() - started
        print(f"frozen weights are in {self._folder / name} after {seconds:.1f} s", flush=True)

    def restore(self, name: str, wait: frozen_file.Wait) -> None:
        """Read the weights from file ``name``, unless the process has them.

        Raises FrozenFileError, the errors of ``wait``, and UnsupportedState if the weights have
        changed in this process.
        """
        if not name:
            raise frozen_file.FrozenFileError("the state was captured without its frozen weights")
        if name == self._name:
            self._refuse_changes()
        else:
            self._name = ""
            frozen_file.read(self._folder, name, self._weights, wait)
            self._remember(name)

    def _remember(self, name: str) -> None:
        self._name = name
        self._version = self._count_versions()
        self._fingerprint = self._sums()

    def _refuse_changes(self) -> None:
        version = self._count_versions()
        if self._sums() != self._fingerprint:
            raise UnsupportedState(
                "frozen weights have changed in training: in a role that has more than"
                f" {MAX_FROZEN_BYTES >> 20} MiB of them they are written once, and could not be"
                " restored; leave them as they are, or run it without protection"
            )
        self._version = version

    def _count_versions(self) -> int:
        return sum(tensor._version for tensor in self._tensors)

    def _sums(self) -> list[int]:
        sums = fingerprint(self._tensors, self._tensors[0].device)
        return [int(value) for value in sums.tolist()]
