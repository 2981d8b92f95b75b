"""The embedded trainer, which waits before one iteration until something is there.

Arguments: ITERATION PATH, then those of the trainer. An export takes seconds, iterations of a
tiny model take none: the run must not be over before.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from deadpool_megatron.trainer import __main__ as trainer
from deadpool_megatron.trainer import loop

_PATIENCE_SECONDS = 60.0
_train_step = loop.TrainingLoop.train_step


def held(iteration: int, place: Path) -> Any:
    """The step, held before ``iteration``."""

    def train_step(self: Any) -> None:
        limit = time.monotonic() + _PATIENCE_SECONDS
        while self.counters["iteration"] + 1 == iteration and not place.exists():
            assert time.monotonic() < limit, f"{place} did not come"
            time.sleep(0.02)
        _train_step(self)

    return train_step


if __name__ == "__main__":
    iteration, path, *rest = sys.argv[1:]
    loop.TrainingLoop.train_step = held(int(iteration), Path(path))  # type: ignore[method-assign]
    sys.exit(trainer.main(rest))
