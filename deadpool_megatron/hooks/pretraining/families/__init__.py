"""What differs between versions of Megatron-LM: one small module for each family of them.

Everything else in these hooks asks :func:`family` and no version.
"""

from __future__ import annotations

import functools

from deadpool_megatron.hooks.pretraining.families.family import Family, Place
from deadpool_megatron.hooks.pretraining.families.v016 import Megatron016
from deadpool_megatron.hooks.pretraining.families.v017 import Megatron017

__all__ = ["Family", "Place", "family"]


@functools.cache
def family() -> Family:
    """Returns that of the Megatron in use; a version that nobody tried counts as the newest."""
    from megatron.core.package_info import __version__

    old = __version__.startswith("0.16.")
    return Megatron016() if old else Megatron017()
