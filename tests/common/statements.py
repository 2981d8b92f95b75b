"""Transcripts: each line is a statement of Python, and below it is its output."""

import builtins
import contextlib
import functools
import importlib
import io
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import deadpool_megatron
from tests.common.stand_in import StandIn

_NAMES: dict[str, Any] = {
    "Is": SimpleNamespace,
    "Path": Path,
    "StandIn": StandIn,
    "replace": replace,
}
_DEFINITION = re.compile(r"^(?:(?:async )?def |class )?([a-zA-Z]\w*)(?=[(:\[]| =)", re.MULTILINE)
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_DIGEST = re.compile(r"\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*[0-9])[0-9a-f]{16,64}\b")


@functools.cache
def _modules() -> dict[str, str]:
    """Return the modules of the package by the public names that they alone define."""
    package = Path(deadpool_megatron.__file__).parent
    found: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for file in package.rglob("*.py"):
        module = ".".join(file.relative_to(package.parent).with_suffix("").parts)
        names = set(_DEFINITION.findall(file.read_text()))
        found |= dict.fromkeys(names, module.removesuffix(".__init__"))
        counts.update(names)
    return {name: found[name] for name, count in counts.items() if count == 1}


class _Names(dict[str, Any]):
    """The names of a transcript. Modules need no import, nor do definitions of the package whose
    name a single module of it has."""

    def __missing__(self, name: str) -> Any:
        if name in vars(builtins):
            raise KeyError(name)
        if module := _modules().get(name):
            self[name] = getattr(importlib.import_module(module), name)
        else:
            with contextlib.suppress(ImportError):
                self[name] = importlib.import_module(name)
        return dict(self)[name]


def live(script: Sequence[str], _: dict[str, Any], directory: Path) -> list[str]:
    """Return the statements, each with its value, output and error. They have the names
    ``directory``, which is empty, ``patch``, which is undone at the end, ``Is`` for
    SimpleNamespace, and those that :class:`_Names` imports."""
    lines, digests = list[str](), dict[str, str]()
    with pytest.MonkeyPatch.context() as patch:
        names = _Names(_NAMES, directory=directory, patch=patch)
        for line in script:
            shown = io.StringIO()
            with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
                try:
                    exec(compile(f"{line}\n", "<life>", "single"), names)
                except (NameError, SyntaxError, KeyboardInterrupt):  # an error of the script
                    raise
                except BaseException as error:  # EpochClosed is no Exception
                    print(f"{type(error).__name__}: {error}")
            text = _ADDRESS.sub("", shown.getvalue().replace(str(directory), "DIR"))
            text = _DIGEST.sub(lambda m: digests.setdefault(m[0], f"DIGEST{len(digests)}"), text)
            lines += [line, *(f"    {part}" for part in text.splitlines())]
    return lines
