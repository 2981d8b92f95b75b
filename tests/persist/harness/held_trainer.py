"""The embedded trainer, held before some iterations.

Arguments: ITERATION=PATTERN[,...] (see hold.py), then those of the trainer.
"""

import sys
from typing import Any

from deadpool_megatron.trainer import __main__ as trainer, gpt_loop
from tests.persist.harness.hold import Waits, hold, waits_of

_train_step = gpt_loop.TrainingLoop.train_step


def held(waits: Waits) -> Any:
    """The step, held."""

    def train_step(self: Any) -> None:
        hold(waits, self.counters["iteration"] + 1)
        _train_step(self)

    return train_step


if __name__ == "__main__":
    waits, *rest = sys.argv[1:]
    gpt_loop.TrainingLoop.train_step = held(waits_of(waits))  # type: ignore[method-assign]
    sys.exit(trainer.main(rest))
