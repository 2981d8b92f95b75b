"""Lives written as statements: each line is one of Python's, and below it is all that it shows."""

import contextlib
import importlib
import io
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deadpool_megatron.settings import Settings
from tests.common.stand_in import StandIn

_MODULES = (
    *("asyncio", "contextlib", "dataclasses", "errno", "io", "itertools", "json", "os", "re"),
    *("signal", "socket", "subprocess", "sys", "threading", "time"),
)
_NAMES: dict[str, Any] = {name: importlib.import_module(name) for name in _MODULES} | {
    "Is": SimpleNamespace,
    "Path": Path,
    "Settings": Settings,
    "StandIn": StandIn,
    "replace": replace,
}
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_DIGEST = re.compile(r"\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*[0-9])[0-9a-f]{16,64}\b")


def live(script: Sequence[str], _: dict[str, Any], directory: Path) -> list[str]:
    """Each statement with its value, what it printed, and its error. Names that are there:
    ``directory``, an empty one, ``patch``, which is undone at the end, common modules, and ``Is``
    for SimpleNamespace."""
    lines, digests = list[str](), dict[str, str]()
    with pytest.MonkeyPatch.context() as patch:
        names = {**_NAMES, "directory": directory, "patch": patch}
        for line in script:
            shown = io.StringIO()
            with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
                try:
                    exec(compile(f"{line}\n", "<life>", "single"), names)
                except (NameError, SyntaxError, KeyboardInterrupt):  # of the script itself
                    raise
                except BaseException as error:  # that of a closed epoch is no Exception
                    print(f"{type(error).__name__}: {error}")
            text = _ADDRESS.sub("", shown.getvalue().replace(str(directory), "DIR"))
            text = _DIGEST.sub(lambda m: digests.setdefault(m[0], f"DIGEST{len(digests)}"), text)
            lines += [line, *(f"    {part}" for part in text.splitlines())]
    return lines
