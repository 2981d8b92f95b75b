"""The names of megatron-core that the trainer uses, imported after the CPU stand-ins.

The stand-ins must be in place before Megatron's first import, so no other module of this package
imports Megatron itself.
"""

# mypy: implicit-reexport
# ruff: noqa: F401
from __future__ import annotations

import os
import warnings

# torch.optim would import this module with the first optimizer, for half a second in each rank. An
# import here is over before ranks are forked.
import torch._dynamo

from deadpool_megatron.megatron import in_process_writer, stand_ins

# Megatron relies on the order in which kernels are launched to overlap them, and only a single
# queue keeps this order. The driver reads the variable when it starts.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

# Every rank would print these warnings, and a user cannot act on them: Megatron uses names that
# PyTorch has changed, and has a deprecated default.
warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed.c10d_logger")
warnings.filterwarnings("ignore", message="full scope is deprecated", module="megatron.core")

with warnings.catch_warnings():
    # On import Megatron warns that it uses PyTorch without Apex and TE, and its modules import each
    # other by deprecated names.
    warnings.filterwarnings("ignore", message=".*[Ff]alling back to.*")
    warnings.filterwarnings("ignore", category=DeprecationWarning)

    stand_ins.install()

    from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import (
        OptimizerParamScheduler,
        get_canonical_lr_for_logging,
    )
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker
    from megatron.core.transformer.transformer_block import (
        TransformerBlockSubmodules,
        get_num_layers_to_build,
    )
    from megatron.core.transformer.transformer_config import TransformerConfig

    in_process_writer.install()
