"""pretrain_gpt.py on a blend of two texts, with loader workers, as benches start it."""

import email
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from deadpool_megatron.trainer.config import TrainerConfig
from tests.megatron_lm.harness.arguments import real_text, small
from tests.megatron_lm.harness.stock import TREE_VARIABLE

_WORKERS = 2
_OF_CONFIG = (
    *("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size"),
    *("global_batch_size", "train_iters", "pipeline_model_parallel_size"),
    "use_distributed_optimizer",
)
_ROOT = Path(__file__).parents[3]


def arguments(folder: Path, config: TrainerConfig) -> list[str]:
    """The flags of a model on a blend whose texts and index are below ``folder``."""
    texts = {package: folder / package.__name__ for package in (json, email)}
    paths = [real_text(place, package)["data_path"] for package, place in texts.items()]
    data = {"mock_data": None, "data_path": (0.7, paths[0], 0.3, paths[1])}
    data |= {"data_cache_path": folder / "index", "num_workers": _WORKERS}
    given = {name: getattr(config, name) for name in _OF_CONFIG}
    return small(**data, **given, max_position_embeddings=config.seq_length)


def plain(checkout: Path, ranks: int, flags: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The command that trains on ``ranks`` without protection, and its variables."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    rank = ("-m", "tests.megatron_lm.harness.ranks", str(checkout), "/dev/null", "exact")
    variables = {TREE_VARIABLE: str(checkout), "PYTHONPATH": str(_ROOT)}
    return [sys.executable, *launcher, *rank, *flags], variables
