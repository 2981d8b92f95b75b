"""A trainer of a house: its own data set, model and step, with arguments of its own."""

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.training import get_args
from megatron.training.arguments import core_transformer_config_from_args
from starting import start


class Counting(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sample number n counts from n on, in steps that an argument gives."""

    def __init__(self, samples: int, length: int, vocabulary: int, stride: int) -> None:
        self._samples, self._length = samples, length
        self._vocabulary, self._stride = vocabulary, stride

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        steps = torch.arange(self._length + 1) * self._stride + int(number)
        return {"text": steps % self._vocabulary}


def own_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    group = parser.add_argument_group("house")
    group.add_argument("--house-stride", type=int, default=1)
    group.add_argument("--house-smoothing", type=float, default=0.0)
    return parser


def data(sizes: list[int | None], **_: Any) -> list[Counting | None]:
    args = get_args()
    shape = (args.seq_length, args.padded_vocab_size, args.house_stride)
    return [Counting(size, *shape) if size else None for size in sizes]


def model(pre_process: bool = True, post_process: bool = True, **more: Any) -> GPTModel:
    args = get_args()
    config = more.get("config") or core_transformer_config_from_args(args)
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
    )


def forward(samples: Iterator[dict[str, torch.Tensor]] | None, chunk: Any) -> tuple[Any, Any]:
    args = get_args()
    given = next(samples) if samples is not None else None
    text = tensor_parallel.broadcast_data(["text"], given, torch.int64)["text"]
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    positions = torch.arange(args.seq_length).expand_as(tokens)
    mask = torch.ones(1, 1, args.seq_length, args.seq_length).triu(1).bool()

    def loss(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        flat = losses.float().view(-1)
        count = torch.tensor(flat.numel(), dtype=torch.int)
        total = flat.sum() * (1 - args.house_smoothing)
        told = torch.cat([total.detach().view(1), count.view(1)])
        return total, count, {"house loss": told}

    return chunk(tokens, positions, mask, labels=labels), loss


if __name__ == "__main__":
    start(data, model, forward, own_arguments)
