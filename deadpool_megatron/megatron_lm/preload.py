"""Preloads Megatron-LM in the process that forks training processes."""

from __future__ import annotations

import importlib

from deadpool_megatron.megatron_lm.checkout import import_megatron, script_of_this_run

_script = script_of_this_run()
if _script is not None:
    try:
        import_megatron(_script)
    except (ValueError, RuntimeError) as error:
        raise ImportError(str(error)) from error
    importlib.import_module("deadpool_megatron.megatron.pretraining.pretrain_program")
