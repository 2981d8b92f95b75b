"""Imported once for all ranks: the Megatron-LM that a variable names, as it is, on a CPU."""

import os
from pathlib import Path

from deadpool_megatron.megatron import stand_ins

TREE_VARIABLE = "DEADPOOL_TEST_TREE"

if tree := os.environ.get(TREE_VARIABLE):
    stand_ins.install_megatron_lm(Path(tree))
    import megatron.core
    import megatron.training
    import torch

    torch.set_num_threads(1)  # as members have
    for module in (megatron.core, megatron.training):
        assert str(module.__file__).startswith(tree)
