"""Layers of a hybrid model for --spec of pretrain_hybrid.py that need no Transformer Engine.

Megatron's own are of Transformer Engine, and those with a state space are kernels for a GPU.
"""

from dataclasses import replace

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.models.hybrid import hybrid_block
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)

# The class that the stack takes by itself, for its last norm.
hybrid_block.TENorm = WrappedTorchNorm

_dense = get_gpt_layer_local_submodules()
_experts = get_gpt_layer_local_submodules(num_experts=4)
_no_attention = {
    "input_layernorm": IdentityOp,
    "self_attention": IdentityOp,
    "self_attn_bda": TransformerLayerSubmodules().self_attn_bda,
}
_no_mlp = {
    "pre_mlp_layernorm": IdentityOp,
    "mlp": IdentityOp,
    "mlp_bda": TransformerLayerSubmodules().mlp_bda,
}

hybrid_stack_spec = ModuleSpec(
    module=hybrid_block.HybridStack,
    submodules=hybrid_block.HybridStackSubmodules(
        attention_layer=ModuleSpec(TransformerLayer, submodules=replace(_dense, **_no_mlp)),
        mlp_layer=ModuleSpec(MLPLayer, submodules=replace(_dense, **_no_attention)),
        moe_layer=ModuleSpec(MoETransformerLayer, submodules=replace(_experts, **_no_attention)),
    ),
)
