"""Builds groups, model chunks, optimizer and learning-rate schedule for one rank."""

from __future__ import annotations

import functools
import importlib.util
import random
from typing import Any, cast

import numpy as np
import torch

from deadpool_megatron.megatron.optimizer import complete_state
from deadpool_megatron.trainer import megatron_api as mcore
from deadpool_megatron.trainer.config import BadArgumentsError, TrainerConfig
from deadpool_megatron.trainer.megatron_api import parallel_state, tensor_parallel

# Fields that have the same name in Megatron's configs.
_MODEL_FIELDS = """
num_layers hidden_size num_attention_heads tensor_model_parallel_size pipeline_model_parallel_size
virtual_pipeline_model_parallel_size expert_model_parallel_size sequence_parallel bf16 fp16
"""
_EXPERT_FIELDS = """
moe_router_score_function moe_router_load_balancing_type moe_router_enable_expert_bias
moe_input_jitter_eps
"""
_DDP_FIELDS = """
overlap_grad_reduce overlap_param_gather use_distributed_optimizer
num_distributed_optimizer_instances
"""
_OPTIMIZER_FIELDS = """
lr min_lr weight_decay bf16 fp16 initial_loss_scale hysteresis use_distributed_optimizer
overlap_param_gather clip_grad
"""
# Megatron's distance between the seeds of neighbouring pipeline stages.
_STAGE_SEED_STEP = 100


class SequenceParallelNorm(torch.nn.LayerNorm):
    """A layer norm with the mark by which finalize_model_grads sums gradients over the
    tensor-parallel ranks.

    Megatron's own PyTorch norm lacks this mark, and therefore refuses sequence parallelism.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_unused: object) -> None:
        super().__init__(hidden_size, eps=eps)
        for parameter in self.parameters():
            cast(Any, parameter).sequence_parallel = config.sequence_parallel


def initialize_parallel_state(config: TrainerConfig) -> None:
    """Create Megatron's groups in the current world of torch.distributed. Collective.

    Raises BadArgumentsError if the layout does not fit the world, or needs a missing package.
    """
    config.check_world_size(torch.distributed.get_world_size())
    needs_einops = config.num_distributed_optimizer_instances > 1
    if needs_einops and importlib.util.find_spec("einops") is None:
        raise BadArgumentsError(
            "--num-distributed-optimizer-instances needs the package einops: pip install einops"
        )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
        expert_model_parallel_size=config.expert_model_parallel_size,
        num_distributed_optimizer_instances=config.num_distributed_optimizer_instances,
        create_gloo_process_groups=False,
    )


def seed_generators(config: TrainerConfig) -> None:
    """Seed all random generators for this rank, as Megatron does at the start."""
    seed = config.seed + _STAGE_SEED_STEP * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def build_model(config: TrainerConfig) -> list[torch.nn.Module]:
    """Build the model chunks of this rank, each wrapped in DDP. With a virtual pipeline there are
    several chunks. Collective."""
    transformer = _transformer_config(config)
    ddp_config = mcore.DistributedDataParallelConfig(
        **_values_of(config, _DDP_FIELDS),
        grad_reduce_in_fp32=config.bf16,
        bucket_size=config.ddp_bucket_size,
    )
    chunks: list[torch.nn.Module] = []
    for index in range(config.virtual_pipeline_model_parallel_size or 1):
        vp_stage = None if config.virtual_pipeline_model_parallel_size is None else index
        chunk = build_chunk(config, transformer, vp_stage)
        # As in Megatron, only the first chunk's gradients are split into buckets.
        chunks.append(
            mcore.DistributedDataParallel(
                transformer, ddp_config, chunk, disable_bucketing=index > 0
            )
        )
    return chunks


def build_chunk(config: TrainerConfig, transformer: Any, vp_stage: int | None) -> torch.nn.Module:
    """Build a model chunk of this rank without DDP. ``transformer``: Megatron's config;
    ``vp_stage``: the index of the chunk, None without a virtual pipeline."""
    layer = mcore.get_gpt_layer_local_spec(num_experts=config.num_experts)
    layer.submodules.input_layernorm = SequenceParallelNorm
    layer.submodules.pre_mlp_layernorm = SequenceParallelNorm
    layers = [layer] * mcore.get_num_layers_to_build(transformer, vp_stage=vp_stage)
    model = mcore.GPTModel(
        config=transformer,
        transformer_layer_spec=mcore.TransformerBlockSubmodules(
            layer_specs=layers, layer_norm=SequenceParallelNorm
        ),
        vocab_size=config.vocab_size,
        max_sequence_length=config.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        share_embeddings_and_output_weights=not config.untie_embeddings_and_output_weights,
        vp_stage=vp_stage,
    )
    if torch.cuda.is_available():
        model.cuda(torch.cuda.current_device())
    wrapped = mcore.Float16Module(transformer, model) if config.bf16 or config.fp16 else model
    for module in wrapped.modules():
        # The half-precision wrapper casts the router's bias, and the first forward pass would cast
        # the bias back to fp32. A cast here keeps the layout of the state constant.
        if hasattr(module, "_maintain_float32_expert_bias"):
            module._maintain_float32_expert_bias()
    return cast(torch.nn.Module, wrapped)


def _values_of(config: TrainerConfig, names: str) -> dict[str, Any]:
    return {name: getattr(config, name) for name in names.split()}


def _parameter_type(config: TrainerConfig) -> torch.dtype:
    if config.bf16:
        return torch.bfloat16
    return torch.float16 if config.fp16 else torch.float32


def _transformer_config(config: TrainerConfig) -> Any:
    interleaved = config.virtual_pipeline_model_parallel_size is not None
    dtype = _parameter_type(config)
    values: dict[str, Any] = {
        **_values_of(config, _MODEL_FIELDS),
        "add_bias_linear": not config.disable_bias_linear,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "deallocate_pipeline_outputs": True,
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        # The following options need kernels of Apex or Transformer Engine.
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
    }
    if config.num_experts is not None:
        values |= {
            **_values_of(config, _EXPERT_FIELDS),
            "num_moe_experts": config.num_experts,
            "moe_ffn_hidden_size": 4 * config.hidden_size,
            "moe_aux_loss_coeff": 0.01,
            "moe_token_dispatcher_type": "alltoall",
        }
    return mcore.TransformerConfig(**values)


def build_optimizer(config: TrainerConfig, chunks: list[torch.nn.Module]) -> Any:
    """Build Megatron's ChainedOptimizer over the chunks, and create its state. Collective."""
    optimizer = mcore.get_megatron_optimizer(
        mcore.OptimizerConfig(
            **_values_of(config, _OPTIMIZER_FIELDS), params_dtype=_parameter_type(config)
        ),
        chunks,
        use_gloo_process_groups=False,
    )
    # Megatron cannot write or read a checkpoint of an Adam without state.
    complete_state(optimizer)
    return optimizer


def build_scheduler(config: TrainerConfig, optimizer: Any) -> Any:
    """Build Megatron's schedule of learning rate and weight decay, whose steps are samples."""
    samples = functools.partial(int.__mul__, config.global_batch_size)
    return mcore.OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=samples(config.lr_warmup_iters),
        lr_decay_steps=samples(config.train_iters),
        lr_decay_style=config.lr_decay_style,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=samples(config.train_iters),
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=config.override_opt_param_scheduler,
    )
