"""Sections of a plan that follow from the arguments of a Megatron-LM script.

A key whose argument is not given is omitted, so the default of the plan or its refusal applies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deadpool_megatron.planning.model_replicas import Workload
from deadpool_megatron.support import flags

#: section -> key -> argument
_ARGUMENTS = {
    "model": {
        "layers": "num_layers",
        "hidden": "hidden_size",
        "heads": "num_attention_heads",
        "kv_heads": "num_query_groups",
        "ffn": "ffn_hidden_size",
        "vocab": "vocab_size",
        "swiglu": "swiglu",
        "untied": "untie_embeddings_and_output_weights",
        "experts": "num_experts",
        "experts_per_token": "moe_router_topk",
    },
    "parallel": {
        "tp": "tensor_model_parallel_size",
        "pp": "pipeline_model_parallel_size",
        "cp": "context_parallel_size",
        "ep": "expert_model_parallel_size",
        "etp": "expert_tensor_parallel_size",
        "optimizer_instances": "num_distributed_optimizer_instances",
    },
    "protection": {
        "scheme": "deadpool_protection",
        "copies": "deadpool_copies",
        "max_lag": "deadpool_max_lag",
    },
}
_VOCABULARIES = {"Llama2Tokenizer": 32_000, "GPT2BPETokenizer": 50_257}
#: values for hosts with eight H100; none was measured here
ASSUMED: dict[str, Any] = {
    "gpus_per_node": 8,
    "spares": 1,
    "host_memory_gb": 1000,
    "host_memory_reserved_gb": 300,
    "nic_gb_s": 12.5,
    "nic_fraction": 0.5,
    "pcie_gb_s": 25,
    "checksum_gb_s": 5,
    "tflops_per_gpu": 989,
    "efficiency": 0.4,
    "forward_backward_fraction": 0.9,
}


def sections_of(tokens: Sequence[str], nodes: int) -> dict[str, dict[str, Any]]:
    """Return the sections for a cluster of ``nodes`` training nodes, with ASSUMED values for the
    hosts. Raises ValueError for a batch that Megatron-LM refuses on this cluster."""
    arguments = flags.named_arguments(tokens)
    given, work = vars(arguments), Workload.of(arguments)
    sections = {
        section: {key: given[name] for key, name in names.items() if name in given}
        for section, names in _ARGUMENTS.items()
    }
    model, parallel = sections["model"], sections["parallel"]
    hidden = model.get("hidden", 0)
    # Megatron-LM's validation computes the same default.
    default = int(hidden * 8 / 3 / 64) * 64 if "swiglu" in model else 4 * hidden
    model["ffn"] = given.get("moe_ffn_hidden_size", model.get("ffn", default))
    model["biases"] = "disable_bias_linear" not in given
    model["rmsnorm"] = given.get("normalization") == "RMSNorm"
    if given.get("position_embedding_type", "learned_absolute") == "learned_absolute":
        model["positions"] = given.get("max_position_embeddings", 0)
    if size := _VOCABULARIES.get(str(given.get("tokenizer_type"))):
        model.setdefault("vocab", size)
    parallel["distributed_optimizer"] = "use_distributed_optimizer" in given
    parallel |= {"tp": work.grid.tp, "pp": work.grid.pp}
    parallel["dp"] = max(1, nodes * int(ASSUMED["gpus_per_node"]) // work.grid.ranks)
    if problem := work.problem(parallel["dp"]):
        raise ValueError(f"{parallel['dp']} data-parallel ranks: {problem}")
    cluster = {**ASSUMED, "nodes": nodes}
    cluster["tokens_per_step"] = given.get("global_batch_size", 0) * given.get("seq_length", 0)
    return {**sections, "cluster": cluster}
