"""Which versions of torch the groups have been run on, and what is said of others.

The package asks an installer for no upper bound: it must not replace the torch of an image.
"""

from __future__ import annotations

import re

#: (major, minor): all tests run on these
ALL_TESTS = frozenset({(2, 13)})
#: and those that scripts/compat.sh starts on these; docs/compatibility.md says what came of it
SOME_TESTS = frozenset({(2, 14), (2, 15)})
#: torch before it cannot make a backend whose operations raise
OLDEST = (2, 10)


class UnsupportedTorch(RuntimeError):
    """This torch lacks something that the groups need."""


def remark(version: str) -> str:
    """What a user should know of ``version`` of torch; empty when all tests run on it.

    Raises UnsupportedTorch for one that cannot work.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        return f"torch {version}: cannot tell which version that is"
    number = int(found[1]), int(found[2])
    if number < OLDEST:
        raise UnsupportedTorch(f"torch {version} is too old: {_text(OLDEST)} is the oldest")
    if number in ALL_TESTS:
        return ""
    if number in SOME_TESTS:
        return f"torch {version}: only some tests have been run on it (docs/compatibility.md)"
    run = ", ".join(map(_text, sorted(ALL_TESTS | SOME_TESTS)))
    return f"torch {version}: the tests have been run on {run}; groups may lack its newest methods"


def _text(number: tuple[int, int]) -> str:
    return f"{number[0]}.{number[1]}"
