"""The mask of a sample does not depend on the samples that a process has read before."""

import sys
from collections import OrderedDict
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.utils import Split

from deadpool_megatron.megatron.pretraining.build import Build, _Source

LENGTH, SAMPLES, WORD, END, PADDING = 16, 24, 3, 8, 9


class Padded:
    """Documents of one length, each with tokens, its end, and the padding that it needs."""

    sequence_lengths = np.full(SAMPLES + 1, LENGTH, dtype=np.int32)

    def get(self, number: int, offset: int = 0, length: int | None = None) -> Any:
        count = 1 + number * 5 % (LENGTH - 2)
        whole = np.full(LENGTH, PADDING, dtype=np.int64)
        whole[:count], whole[count] = WORD, END
        return whole[offset:] if length is None else whole[offset : offset + length]


def data_set(kind: str) -> Any:
    config = GPTDatasetConfig(
        random_seed=3,
        sequence_length=LENGTH,
        split="100,0,0",
        tokenizer=SimpleNamespace(
            eod=END, pad=PADDING, vocab_size=10, unique_identifiers=OrderedDict(kind="made up")
        ),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=kind == "ends are masked",
        create_attention_mask=False,
        mid_level_dataset_surplus=0.005,
    )
    low: Any = Padded()
    documents = np.arange(SAMPLES + 1, dtype=np.int32)
    first, second = (
        MockGPTDataset(low, None, documents, SAMPLES, Split.train, config) for _ in range(2)
    )
    return BlendedDataset([first, second], [1, 1], SAMPLES, config) if kind == "blend" else first


@pytest.mark.parametrize("kind", ["single", "blend", "ends are masked"])
def test_process_that_begins_elsewhere_masks_the_same(kind, monkeypatch):
    """Megatron keeps the mask of the first sample that a process reads, with its padding."""
    training: Any = ModuleType("megatron.training")
    training.get_args = SimpleNamespace
    monkeypatch.setitem(sys.modules, training.__name__, training)

    def read(*numbers: int) -> torch.Tensor:
        command_line: Any = None
        build = Build(command_line)
        build._sources.append(_Source(lambda _: (None, None, None), None))
        make = build.handlers()["build_train_valid_test_datasets"]
        train, nothing, _ = make(lambda: (data_set(kind), None, data_set(kind)))
        assert nothing is None
        masks: list[torch.Tensor] = [train[number]["loss_mask"].clone() for number in numbers]
        return masks[-1]

    for last in range(4, 12):
        assert torch.equal(read(0, 1, 2, 3, last), read(last))
        assert read(last).any()
