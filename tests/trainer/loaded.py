"""Everything of Megatron that a rank needs, imported before the ranks are forked."""

import torch

from deadpool_megatron.megatron import stand_ins

stand_ins.install()
torch.set_num_threads(1)

from deadpool_megatron.trainer import gpt_loop, loop_checkpoint, plain  # noqa: E402, F401
