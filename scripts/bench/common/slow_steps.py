#!/usr/bin/env python
"""The trainer, each of whose steps takes BENCH_COMPUTE_SECONDS longer, as if on a device.

    slow_steps.py plain|protected ARGUMENTS OF THE TRAINER...

Sleeping takes no processor from anybody, so that what a bench of the network sees is the network.
"""

from __future__ import annotations

import os
import sys
import time

VARIABLE = "BENCH_COMPUTE_SECONDS"


def main(side: str, arguments: list[str]) -> int:
    """Run the trainer of a side in this process."""
    if side == "plain":
        from deadpool_megatron.platform import preload  # noqa: F401 - before Megatron's import
        from deadpool_megatron.trainer import plain as trainer
    else:
        from deadpool_megatron.trainer import __main__ as trainer  # type: ignore[no-redef]
    from deadpool_megatron.trainer.loop import TrainingLoop

    own_step = TrainingLoop.train_step

    def train_step(loop: TrainingLoop) -> None:
        time.sleep(float(os.environ[VARIABLE]))
        own_step(loop)

    TrainingLoop.train_step = train_step  # type: ignore[method-assign]
    return trainer.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
