"""Which versions of torch the groups have been run on, and what is said of others.

The package asks an installer for no upper bound: it must not replace the torch of an image.
"""

from __future__ import annotations

import re

#: (major, minor) -> what of the tests ran on it; docs/compatibility.md says more
RUN_ON: dict[tuple[int, int], str] = {
    (2, 13): "all",
    (2, 15): "scripts/compat.sh",
}
#: torch before it cannot make a backend whose operations raise
OLDEST = (2, 10)


class UnsupportedTorch(RuntimeError):
    """This torch lacks something that the groups need."""


def remark(version: str) -> str:
    """What a user should know of ``version`` of torch; empty when the tests have run on it.

    Raises UnsupportedTorch for one that cannot work.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        return f"torch {version}: cannot tell which version that is"
    number = int(found[1]), int(found[2])
    if number < OLDEST:
        raise UnsupportedTorch(f"torch {version} is too old: {_text(OLDEST)} is the oldest")
    if number in RUN_ON:
        return ""
    run = ", ".join(map(_text, sorted(RUN_ON)))
    return f"torch {version}: the tests have been run on {run}; groups may lack its newest methods"


def _text(number: tuple[int, int]) -> str:
    return f"{number[0]}.{number[1]}"
