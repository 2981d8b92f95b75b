"""W&B: one run for the whole of a training, and no row missing because a process was killed.

W&B's service keeps rows in memory for a while (offline up to some tens of KiB, else what it has not
sent), ends with the process whose rows they are, and tells nobody which it has written. So the
newest rows lie in the run directory as well, and the process that takes the last role over logs
them again. Where W&B has a server to ask, it says from which step on it lacks rows. Offline each
process has a file of its own, and that of the successor repeats some rows of the one before.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

_FILE = "wandb-rows.jsonl"
# More than W&B was ever seen to hold back, and not more than a megabyte or two.
MOST_ROWS = 1000

# What wandb.log() was given: (values, step).
Call = tuple[Mapping[str, Any], int]


def name_run(environment: MutableMapping[str, str]) -> None:
    """Have wandb.init() make, or go on with, the W&B run of this run; not if the user has said how
    runs are resumed."""
    if "WANDB_RESUME" not in environment and "DEADPOOL_RUN_ID" in environment:
        environment["WANDB_RESUME"] = "allow"
        environment.setdefault("WANDB_RUN_ID", f"deadpool-{environment['DEADPOOL_RUN_ID']}")


class WandbRows:
    """The newest rows, in the run directory. Of the process that writes them."""

    def __init__(self, run_directory: Path) -> None:
        self._path = run_directory / _FILE
        # A line for each block of rows that was kept.
        self._lines: list[str] = []

    def begin(self) -> None:
        """Nobody has logged anything that counts."""
        self._path.unlink(missing_ok=True)

    def keep(self, calls: Iterable[Call]) -> None:
        """Keep what W&B is about to be given; pictures, tables and the like are not."""
        by_step: dict[int, dict[str, Any]] = {}
        for values, step in calls:
            known = {name: _plain(value) for name, value in values.items()}
            kept = {name: value for name, value in known.items() if value is not None}
            by_step.setdefault(step, {}).update(kept)
        if not by_step:
            return
        line = json.dumps(list(by_step.items())) + "\n"
        self._lines.append(line)
        if len(self._lines) > 2 * MOST_ROWS:
            self._lines = self._lines[-MOST_ROWS:]
            new = self._path.with_suffix(".new")
            new.write_text("".join(self._lines))
            new.replace(self._path)
        else:
            with self._path.open("a") as file:
                file.write(line)

    def log_again(self, wandb: Any) -> None:
        """Give W&B what another process has given it, from the first step on that it lacks."""
        self._take_over()
        first_step = int(wandb.run.starting_step)
        for line in self._lines[-MOST_ROWS:]:
            for step, values in json.loads(line):
                if step >= first_step:
                    wandb.log(values, step)

    def _take_over(self) -> None:
        """Read the lines of the process before, and leave out one that it had begun."""
        try:
            text = self._path.read_text()
        except OSError:
            return  # there are none
        self._lines = [line for line in text.splitlines(keepends=True) if _is_whole(line)]
        if "".join(self._lines) != text:
            self._path.write_text("".join(self._lines))


def _is_whole(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return line.endswith("\n")


def _plain(value: Any) -> Any:
    """The number or text that it is, None for anything else."""
    if hasattr(value, "numel") and value.numel() == 1:
        value = value.item()
    return value if isinstance(value, bool | int | float | str) else None
