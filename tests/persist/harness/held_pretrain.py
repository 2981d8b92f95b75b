"""Holds pretrain_gpt.py of Megatron-LM before some iterations, as held_trainer.py does its loop.

``import`` it at the head of the script; the environment variable names ITERATION=PATTERN[,...].
"""

import os
from collections.abc import Mapping
from typing import Any

from deadpool_megatron import hookpoints
from tests.persist.harness.hold import hold, waits_of

VARIABLE = "DEADPOOL_TEST_HOLD"
_handlers = hookpoints.handlers


def _held() -> Mapping[str, Any]:
    known = _handlers()
    waits = waits_of(os.environ[VARIABLE])

    def train_step(function: Any, *args: Any, **kwargs: Any) -> Any:
        # Its last argument by position, as train() calls it.
        hold(waits, int(kwargs.get("iteration", args[-1])) + 1)
        return known["train_step"](function, *args, **kwargs)

    return {**known, "train_step": train_step}


hookpoints.handlers = _held
