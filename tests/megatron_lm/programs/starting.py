"""The call of Megatron-LM's pretrain(), as its versions want it, for the programs of this folder.

They lie outside of the checkout, which PYTHONPATH names, as vendors' trainers do.
"""

import inspect
from collections.abc import Callable
from typing import Any

from megatron.core.enums import ModelType
from megatron.training import pretrain


def start(
    data: Callable[..., Any],
    model: Callable[..., Any],
    forward: Callable[..., Any],
    own_arguments: Callable[..., Any],
) -> None:
    """Train; the arguments are providers of pretrain()."""
    data.is_distributed = True  # type: ignore[attr-defined]
    kind = ModelType.encoder_or_decoder
    if "cfg_container" not in inspect.signature(pretrain).parameters:
        pretrain(data, model, kind, forward, extra_args_provider=own_arguments)
        return
    from megatron.training.argument_utils import pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    config = pretrain_cfg_container_from_args(parse_and_validate_args(own_arguments))
    pretrain(config, data, model_provider=model, model_type=kind, forward_step_func=forward)
