"""Arguments and configurations of Megatron-LM, as far as they decide about the place of a role."""

from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig


def arguments(world: int, tp: int = 1, pp: int = 1, **sizes: Any) -> SimpleNamespace:
    """Megatron's validated arguments, as far as they decide over places."""
    values = {
        "world_size": world,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": None,
        "use_tp_pp_dp_mapping": False,
        "virtual_pipeline_model_parallel_size": None,
    }
    return SimpleNamespace(**{**values, **sizes})


def config(args: SimpleNamespace, layers: int = 8, **options: Any) -> TransformerConfig:
    """Return the configuration of a model with so few layers, cut by ``args``."""
    return TransformerConfig(
        num_layers=layers,
        hidden_size=8,
        num_attention_heads=2,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        pipeline_dtype=torch.float32,
        **options,
    )
