"""Imported once by the process that members are forked from: what every member needs.

The stand-ins have to be in place before the first import of Megatron, so this module installs the
platform and only then imports. It starts no thread; where a driver is present it may touch it, and
then nothing is forked.
"""

from __future__ import annotations

import importlib

from deadpool_megatron.platform import select_platform

_MODULES = (
    "torch",
    "torch._dynamo",
    "megatron.core",
    "megatron.core.distributed",
    "megatron.core.optimizer",
    "megatron.core.models.gpt",
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.dist_checkpointing",
)

select_platform().install()
for _name in _MODULES:
    importlib.import_module(_name)
