"""Text as bytes, in micro batches whose position is a pure function of the samples consumed."""

from __future__ import annotations

import functools
import itertools
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from deadpool_megatron.trainer.config import BadArgumentsError, TrainerConfig

# The last part of a text, one of so many, is kept for validation.
_VALIDATION_PARTS = 20
_DEFAULT_BYTES = 8 << 20
_NOT_THE_LIBRARY = ("site-packages", "dist-packages", "__pycache__")

Batch = dict[str, torch.Tensor]
_Bytes = NDArray[np.uint8]


class DataError(BadArgumentsError):
    """The training data cannot be used; the message is one line."""


class DataSource:
    """One split of the text, dealt to the data-parallel ranks as Megatron's sampler deals it.

    Samples are windows of the text; each pass over it has them in another order, which follows from
    the seed alone. Within ``micro_batch_size * data_parallel_size`` consecutive samples, rank r has
    the r-th run of ``micro_batch_size``. Nothing is drawn from a global random generator.
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
        """Numbers of the samples in this rank's micro batches, from so many on; endless."""
        size = self._config.micro_batch_size
        for start in itertools.count(consumed_samples + self._rank * size, size * self._ranks):
            yield list(range(start, start + size))

    def iterator_at(self, consumed_samples: int) -> Iterator[Batch]:
        """This rank's micro batches from ``consumed_samples`` on; endless.

        Each holds ``tokens``, ``labels``, ``position_ids`` (int64) and ``loss_mask`` (float32), of
        shape [micro batch, sequence], on the current device.
        """
        positions = torch.arange(self._config.seq_length).expand(self._config.micro_batch_size, -1)
        mask = torch.ones(positions.shape)
        for indices in self.indices_at(consumed_samples):
            texts = torch.from_numpy(np.stack(list(map(self._sample, indices))).astype(np.int64))
            batch = {
                "tokens": texts[:, :-1].contiguous(),
                "labels": texts[:, 1:].contiguous(),
                "position_ids": positions,
                "loss_mask": mask,
            }
            yield {
                name: tensor.cuda(non_blocking=True) if torch.cuda.is_available() else tensor
                for name, tensor in batch.items()
            }

    def _sample(self, index: int) -> _Bytes:
        number, place = divmod(index, self._windows)
        start = int(self._order(number)[place]) * self._config.seq_length
        return self._text[start : start + self._config.seq_length + 1]

    def _order_of_pass(self, number: int) -> NDArray[np.int64]:
        return np.random.default_rng([self._config.seed, number]).permutation(self._windows)


def build_sources(config: TrainerConfig, rank: int, ranks: int) -> tuple[DataSource, DataSource]:
    """Training and validation data of one data-parallel rank of so many.

    Purely local: it does not matter which ranks are there, or when a process joins. Raises
    DataError for too little text.
    """
    text = _text(config.data)
    held_out = len(text) // _VALIDATION_PARTS
    if held_out <= config.seq_length:  # a short text is both
        return DataSource(text, config, rank, ranks), DataSource(text, config, rank, ranks)
    return (
        DataSource(text[:-held_out], config, rank, ranks),
        DataSource(text[-held_out:], config, rank, ranks),
    )


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
    """Python's own source, in a fixed order, as far as it fits into _DEFAULT_BYTES."""
    total = 0
    for folder, inner, names in os.walk(sysconfig.get_path("stdlib")):
        inner[:] = sorted(name for name in inner if name not in _NOT_THE_LIBRARY)
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
