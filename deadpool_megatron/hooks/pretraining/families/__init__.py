"""What differs between versions of Megatron-LM: one small module for each family of them.

Everything else in these hooks asks :func:`family` and no version.
"""

from __future__ import annotations

import functools

from deadpool_megatron.hooks.pretraining.families.family import Family, Place
from deadpool_megatron.hooks.pretraining.families.v016 import Megatron016
from deadpool_megatron.hooks.pretraining.families.v017 import Megatron017
from deadpool_megatron.hooks.pretraining.families.v018 import Megatron018
from deadpool_megatron.hooks.pretraining.families.v019 import Megatron019

__all__ = ["Family", "Place", "family"]

_NEWEST = Megatron019
_FAMILIES: dict[str, type[Family]] = {
    "0.16": Megatron016,
    "0.17": Megatron017,
    "0.18": Megatron018,
}


@functools.cache
def family() -> Family:
    """Returns that of the Megatron in use; a version that nobody tried counts as the newest."""
    from megatron.core.package_info import __version__

    return _FAMILIES.get(".".join(__version__.split(".")[:2]), _NEWEST)()
