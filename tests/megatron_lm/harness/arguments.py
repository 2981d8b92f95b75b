"""Command lines of pretrain_gpt.py for a model that trains on two CPU cores in seconds."""

import json
from pathlib import Path
from types import ModuleType

from tests.megatron_lm.harness.checkout import TAG

# Ids of NullTokenizer are 0 to this; the last ends a document.
VOCABULARY = 1023

_CPU: dict[str, object] = {
    "distributed_backend": "gloo",
    "transformer_impl": "local",
    # Both need kernels of Apex.
    "no_gradient_accumulation_fusion": True,
    "no_masked_softmax_fusion": True,
}
_SMALL: dict[str, object] = {
    "mock_data": True,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": VOCABULARY,
    "split": "100,0,0",
    # Without workers: each would be one more process per rank.
    "num_workers": 0,
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 64,
    "max_position_embeddings": 64,
    "micro_batch_size": 1,
    "global_batch_size": 8,
    "train_iters": 6,
    "lr": 1e-3,
    "lr_decay_style": "constant",
    "log_interval": 1,
    "eval_interval": 1000,
    "eval_iters": 0,
}

#: four experts over two ranks
MOE: dict[str, object] = {
    "num_experts": 4,
    "expert_model_parallel_size": 2,
    "moe_token_dispatcher_type": "alltoall",
    # The fused activation does not take the weights of the experts.
    "no_bias_gelu_fusion": True,
}


def small(**changes: object) -> list[str]:
    """The small model's flags, changed and extended.

    ``True`` stands for a flag without a value, a tuple for several; ``None`` and ``False`` leave a
    flag out.
    """
    flags: list[str] = []
    if changes.get("async_save") and TAG != "core_v0.16.1":
        # The default is a package that is not installed.
        changes = {"async_strategy": "mcore", **changes}
    for name, value in {**_CPU, **_SMALL, **changes}.items():
        if value is None or value is False:
            continue
        flags.append("--" + name.replace("_", "-"))
        if value is not True:
            flags += map(str, value if isinstance(value, tuple) else [value])
    return flags


def real_text(folder: Path, package: ModuleType = json) -> dict[str, object]:
    """Changes for :func:`small` that train on text, prepared below ``folder`` if missing.

    The text is the source of a package; a token is a byte of it.
    """
    import numpy as np
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix = folder / "text"
    if not prefix.with_suffix(".idx").exists():
        folder.mkdir(parents=True, exist_ok=True)
        builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
        for file in sorted(Path(str(package.__file__)).parent.glob("*.py")):
            tokens = np.frombuffer(file.read_bytes(), dtype=np.uint8).astype(np.int32)
            for start in range(0, len(tokens), 1024):
                builder.add_document(piece := tokens[start : start + 1024], [len(piece)])
        builder.finalize(f"{prefix}.idx")
    return {"mock_data": None, "data_path": prefix, "data_cache_path": folder / "index"}
