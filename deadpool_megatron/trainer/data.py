"""Micro batches whose position is a pure function of the samples consumed so far."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from deadpool_megatron.trainer.config import TrainerConfig
from deadpool_megatron.trainer.corpus import END_OF_DOCUMENT, PADDING, DataError, token_file
from deadpool_megatron.trainer.megatron_api import (
    GPTDataset,
    GPTDatasetConfig,
    IndexedDataset,
    Split,
)

# Every so many documents one is kept for validation.
_VALIDATION_STRIDE = 20

# It warns in every rank that an order kept in memory is not kept in a file.
logging.getLogger("megatron.core.datasets.gpt_dataset").setLevel(logging.ERROR)

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class ByteTokenizer:
    """The part of a tokenizer that Megatron's datasets ask for: sizes and special tokens of
    byte-level text."""

    vocab_size: int
    eod: int = END_OF_DOCUMENT
    pad: int = PADDING

    @property
    def unique_identifiers(self) -> dict[str, object]:
        return {"class": type(self).__name__, "vocab_size": self.vocab_size}


class DataSource:
    """One split of the text, dealt to the data-parallel ranks as Megatron's sampler deals it.

    Global batches follow each other in the dataset's shuffled order; within ``micro_batch_size *
    data_parallel_size`` consecutive samples, rank r has the r-th run of ``micro_batch_size``.
    No worker processes, and nothing is drawn from a global random generator.
    """

    def __init__(
        self, dataset: Any, micro_batch_size: int, data_rank: int, data_parallel_size: int
    ) -> None:
        self._dataset = dataset
        self._micro_batch_size = micro_batch_size
        self._data_rank = data_rank
        self._stride = micro_batch_size * data_parallel_size

    def indices_at(self, consumed_samples: int) -> Iterator[list[int]]:
        """Sample numbers of this rank's micro batches from ``consumed_samples`` on; endless."""
        size, length = self._micro_batch_size, len(self._dataset)
        for start in itertools.count(consumed_samples + self._data_rank * size, self._stride):
            yield [index % length for index in range(start, start + size)]

    def iterator_at(self, consumed_samples: int) -> Iterator[Batch]:
        """This rank's micro batches from ``consumed_samples`` on; endless.

        Each holds ``tokens``, ``labels``, ``position_ids`` (int64) and ``loss_mask`` (float32), of
        shape [micro batch, sequence], on the current device.
        """
        for indices in self.indices_at(consumed_samples):
            samples = [self._dataset[index] for index in indices]
            yield {
                key: _to_device(torch.stack([sample[key] for sample in samples]))
                for key in samples[0]
            }


def _to_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cuda(non_blocking=True) if torch.cuda.is_available() else tensor


def build_sources(
    config: TrainerConfig, data_rank: int, data_parallel_size: int
) -> tuple[DataSource, DataSource]:
    """Training and validation data of one data-parallel rank.

    Purely local: every process builds the sample order in memory from the seed, so it does not
    matter which ranks are there, or when a process joins. Raises DataError for too little text.
    """
    prefix = token_file(config.data, config.data_cache_path)
    texts = IndexedDataset(str(prefix))
    documents = np.arange(len(texts.sequence_lengths), dtype=np.int32)
    held_out = documents % _VALIDATION_STRIDE == _VALIDATION_STRIDE - 1
    if not held_out.any():
        # A short text: the last document, or, if it is the only one, the text itself.
        held_out[-1] = True
    training = documents[~held_out] if not held_out.all() else documents
    evaluations = config.train_iters // (config.eval_interval or config.train_iters) + 1
    wanted = {
        Split.train: (training, config.train_iters),
        Split.valid: (documents[held_out], evaluations * config.eval_iters),
    }
    sources = []
    for split, (chosen, batches) in wanted.items():
        tokens = int(texts.sequence_lengths[chosen].sum())
        if tokens <= config.seq_length:
            raise DataError(
                f"{split.name} text has {tokens} tokens, less than one sample of --seq-length"
                f" {config.seq_length} and its successor"
            )
        dataset = GPTDataset(
            texts,
            str(prefix),
            chosen,
            max(1, batches) * config.global_batch_size,
            split,
            _dataset_config(config),
        )
        sources.append(DataSource(dataset, config.micro_batch_size, data_rank, data_parallel_size))
    return sources[0], sources[1]


def _dataset_config(config: TrainerConfig) -> Any:
    # Without a blend Megatron keeps the sample order in memory. With one, it writes the order to
    # shared files, which only rank 0 does: a replacement for another rank would find none.
    return GPTDatasetConfig(
        random_seed=config.seed,
        sequence_length=config.seq_length,
        tokenizer=ByteTokenizer(config.vocab_size),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
