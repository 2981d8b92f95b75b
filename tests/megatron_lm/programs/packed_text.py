"""A trainer around pretrain_gpt.py: its data and model, with a step of its own that weighs the loss
and counts sequences packed into a sample, as from Megatron-LM 0.18 on a step with packed data does.
"""

import argparse
from functools import partial
from typing import Any

import gpt_builders
import torch
from megatron.training import get_args, training
from model_provider import model_provider
from pretrain_gpt import forward_step, train_valid_test_datasets_provider
from starting import start


def own_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    group = parser.add_argument_group("packed text")
    group.add_argument("--piece-length", type=int, default=16)
    group.add_argument("--loss-weight", type=float, default=1.0)
    return parser


def forward(samples: Any, chunk: Any) -> tuple[Any, Any]:
    args = get_args()
    count = getattr(training, "update_seqlen_stats_from_cu_seqlens", None)
    if count is not None:
        # Pieces of other lengths in each iteration.
        piece = args.piece_length + args.curr_iteration
        count(torch.arange(0, args.seq_length + 1, piece, dtype=torch.int32))
    output, loss = forward_step(samples, chunk)

    def weighed(losses: torch.Tensor) -> tuple[Any, ...]:
        total, *more = loss(losses)
        return (total * args.loss_weight, *more)

    return output, weighed


if __name__ == "__main__":
    start(
        train_valid_test_datasets_provider,
        partial(model_provider, gpt_builders.gpt_builder),
        forward,
        own_arguments,
    )
