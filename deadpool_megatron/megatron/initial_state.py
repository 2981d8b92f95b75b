"""The state of optimizers before their first update: what that would begin with, made before it.

Where neither PyTorch, Transformer Engine nor Megatron says with what an optimizer begins, a first
update of copies shows it (:mod:`deadpool_megatron.state.initial_state`).
"""

from __future__ import annotations

from typing import Any

import torch

from deadpool_megatron.megatron.optimizer import inner_optimizers, is_hybrid, updating
from deadpool_megatron.state import initial_state


def complete_state(optimizer: Any) -> None:
    """Create the state that the optimizer would create in its first step, with the same values.

    Raises UnsupportedState for state that is neither tensor nor number, or that cannot be there
    before.
    """
    for inner in inner_optimizers(optimizer):
        for one in updating(inner):
            if initial_state.is_plain_adam(one):
                initial_state.complete_adam(one)
            elif hasattr(one, "initialize_state"):
                _complete_fused_adam(one)
            elif (make := getattr(inner, "init_state_fn", None)) is not None:
                # Megatron's own; for Apex two zeros, as wide as the parameter (fp32).
                make(one, inner.config)
            else:
                initial_state.complete_as_tried(one)
        if is_hybrid(inner):
            inner.optimizer._sync_sub_optimizers_state_to_hdo()
        initial_state.refuse_unknown_values(inner.optimizer)


def _complete_fused_adam(adam: Any) -> None:
    """As its ``step`` does for a parameter that it has not met.

    Not through Megatron's ``init_state_fn``: that one leaves out the second argument, and without
    the precision-aware optimizer it knows of no master weights.
    """
    for group in adam.param_groups:
        for parameter in group["params"]:
            if adam.state[parameter]:
                continue
            remainders = getattr(adam, "store_param_remainders", None)
            if remainders is None:  # before Transformer Engine 2.1
                adam.initialize_state(parameter)
            else:
                both = bool(remainders) and parameter.dtype == torch.bfloat16
                adam.initialize_state(parameter, both)
