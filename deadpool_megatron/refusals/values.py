"""Values that were read, of the flags whose values Megatron-LM's parser lists.

A flag that somebody has read may get a value later that nobody has. What is given for a flag of
this table and stands neither here nor in a row is unreviewed, like a flag that stands nowhere.

Three came after core_v0.16.1 and belong to flags that pass:

* ``--moe-router-load-balancing-type quantile_balancing`` (0.19) keeps a bias for each expert, a sum
  and a count of micro-batches. All three are buffers of the router, which extras capture and
  restore; the sum and the count are emptied at the end of each step; what updates the bias is an
  all-reduce in the place where gradients are finished.
* ``--moe-router-score-function sqrtsoftplus`` (0.18) is arithmetic on the router's logits.
* ``--position-embedding-type yarn`` (0.18) computes its frequencies from the arguments, as
  ``--rope-type yarn`` does; what it keeps of them follows from the length of the sequence.

``--moe-flex-dispatcher-backend ncclep`` (0.19) is read only with the dispatcher that is refused, as
the other two are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from deadpool_megatron.refusals.refused import REFUSED
from deadpool_megatron.refusals.rows import split_words

#: by flag, parted by blanks
VALUES = {
    "--async-strategy": "nvrx mcore",
    "--attention-backend": "flash fused unfused local auto",
    "--ckpt-format": "torch_dist",
    "--cross-entropy-fusion-impl": "native te",
    "--cuda-graph-impl": "none",
    "--dataloader-type": "single cyclic",
    "--dist-ckpt-strictness": (
        "assume_ok_unexpected log_unexpected log_all raise_unexpected raise_all return_unexpected"
        " return_all ignore_all"
    ),
    "--distributed-backend": "nccl gloo",
    "--empty-unused-memory-level": "0 1 2",
    "--error-injection-type": "correct_result transient_error persistent_error",
    "--exp-avg-dtype": "fp32 fp16 bf16 fp8",
    "--exp-avg-sq-dtype": "fp32 fp16 bf16 fp8",
    "--experimental-attention-variant": "gated_delta_net",
    "--fp4-recipe": "nvfp4 custom",
    "--fp8-amax-compute-algo": "most_recent max",
    "--fp8-format": "e4m3 hybrid",
    "--fp8-recipe": "tensorwise delayed mxfp8 blockwise",
    "--inprocess-granularity": "node rank",
    "--lr-decay-style": "constant linear cosine inverse-square-root WSD",
    "--lr-wsd-decay-style": "exponential linear cosine minus_sqrt",
    "--main-grads-dtype": "fp32 bf16",
    "--main-params-dtype": "fp32 fp16",
    "--moe-flex-dispatcher-backend": "deepep hybridep ncclep",
    "--moe-router-dtype": "fp32 fp64",
    "--moe-router-load-balancing-type": (
        "aux_loss seq_aux_loss global_aux_loss sinkhorn none quantile_balancing"
    ),
    "--moe-router-score-function": "softmax sigmoid sqrtsoftplus",
    "--moe-token-dispatcher-type": "allgather alltoall",
    "--moe-token-drop-policy": "probs position",
    "--muon-fp32-matmul-prec": "low medium high",
    "--muon-scale-mode": "spectral unit_rms_norm shape_scaling",
    "--muon-tp-mode": "blockwise duplicated distributed",
    "--no-weight-decay-cond-type": "apply_wd_to_qk_layernorm",
    "--non-persistent-ckpt-type": "global in_memory",
    "--non-persistent-local-ckpt-algo": "fully_parallel atomic",
    "--normalization": "LayerNorm RMSNorm",
    "--optimizer": "adam",
    "--pipeline-model-parallel-comm-backend": "nccl",
    "--position-embedding-type": "learned_absolute rope mrope relative none yarn",
    "--recompute-granularity": "full selective",
    "--recompute-method": "uniform block",
    "--rerun-mode": "disabled validate_results report_stats",
    "--rope-type": "rope yarn",
    "--sharp-enabled-group": "dp dp_replica",
    "--softmax-type": "vanilla off-by-one learnable",
    "--tiktoken-pattern": "v1 v2",
    "--timing-log-level": "0 1 2",
    "--timing-log-option": "max minmax all",
    "--tokenizer-type": (
        "BertWordPieceLowerCase BertWordPieceCase GPT2BPETokenizer SentencePieceTokenizer"
        " GPTSentencePieceTokenizer HuggingFaceTokenizer Llama2Tokenizer TikTokenizer"
        " MultimodalTokenizer NullTokenizer NullMultimodalTokenizer SFTTokenizer"
    ),
    "--tp-comm-bootstrap-backend": "nccl mpi gloo",
    "--transformer-impl": "local transformer_engine",
    "--weight-decay-incr-style": "constant linear cosine",
}


def unread_values(argv: Sequence[str]) -> Iterator[str]:
    """Yields what is given for a flag of :data:`VALUES` and was not read, as ``--flag=value``."""
    flag = ""
    for word in (word for argument in argv for word in split_words(argument)):
        if word.startswith("--"):
            flag = word
        elif flag in VALUES and word not in VALUES[flag].split() and not _has_a_row(flag, word):
            yield f"{flag}={word}"


def _has_a_row(flag: str, value: str) -> bool:
    """Return whether it is refused by a row, whose advice is better."""
    return any(row.is_named_in([flag, value]) for row in REFUSED)
