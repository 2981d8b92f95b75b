"""Files that come with the package and are no modules: configs, batch scripts, patch sets."""

from __future__ import annotations

import site
import sys
import sysconfig
from pathlib import Path

import deadpool_megatron


def shipped_roots() -> list[Path]:
    """Return where such files can be, under their names in the repository.

    First beside the package (a checkout, or an editable installation), then where pip puts data.
    """
    beside = Path(deadpool_megatron.__file__).parents[1]
    prefixes = [
        beside,
        Path(sys.prefix),
        Path(sysconfig.get_path("data")),
        Path(site.getuserbase()),
    ]
    return list(dict.fromkeys([beside, *(p / "share" / "deadpool_megatron" for p in prefixes)]))


def find_shipped(name: str) -> Path | None:
    """Return the first file of that name, like ``configs/tiny.args``; None if there is none."""
    return next((root / name for root in shipped_roots() if (root / name).is_file()), None)
