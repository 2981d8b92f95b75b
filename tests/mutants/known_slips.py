"""A slip, and the reader of those that are known (tests/mutants/*.toml)."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SLIPS = Path(__file__).parent


@dataclass(frozen=True)
class Slip:
    """A slip. ``tests``: files or node ids; a single failure suffices. ``equivalent``: the reason
    why no test can notice it; such a slip is not run. ``budget_seconds``: the time after which no
    further test begins; 0: no limit."""

    id: str
    file: str
    old: str
    new: str
    means: str
    tests: tuple[str, ...] = ()
    slow: bool = False
    equivalent: str = ""
    budget_seconds: float = 0.0

    def applied(self, root: Path = ROOT) -> str:
        """The file's text with the slip in it. Raises ValueError if it cannot be made."""
        path = root / self.file
        text = path.read_text() if path.exists() else ""
        if text.count(self.old) != 1:
            raise ValueError(f"its text is {text.count(self.old)} times in {self.file}")
        return text.replace(self.old, self.new)


def load(directory: Path = SLIPS) -> list[Slip]:
    """Return all slips of a directory, in order. Raises ValueError for a wrong slip."""
    found: dict[str, Slip] = {}
    for path in sorted(directory.glob("*.toml")):
        for entry in tomllib.loads(path.read_text())["slip"]:
            try:
                slip = Slip(**{**entry, "tests": tuple(entry.get("tests", ()))})
            except TypeError as error:
                raise ValueError(f"{path.name}: {entry.get('id')}: {error}") from None
            if slip.id in found or bool(slip.tests) == bool(slip.equivalent):
                raise ValueError(f"{path.name}: {slip.id}: there twice, or without tests")
            found[slip.id] = slip
    return list(found.values())


def missing_tests(slip: Slip, root: Path = ROOT) -> list[str]:
    """Those of a slip's tests whose file does not have them, by their names."""

    def there(test: str) -> bool:
        file, *names = test.split("[")[0].split("::")
        path = root / file
        text = path.read_text() if path.is_file() else ""
        return path.exists() and all(
            re.search(rf"^\s*(?:(?:async )?def |class |from .* ){n}\b", text, re.M) for n in names
        )

    return [test for test in slip.tests if not there(test)]
