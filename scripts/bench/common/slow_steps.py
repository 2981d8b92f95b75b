#!/usr/bin/env python
"""The trainer with steps that take BENCH_COMPUTE_SECONDS longer, as if on a device: at their
begin, or with BENCH_COMPUTE_AT "end" between the backward pass and the optimizer.

    slow_steps.py plain|protected ARGUMENTS OF THE TRAINER...

Sleeping uses no processor, so that a bench of the network measures the network.
"""

from __future__ import annotations

import os
import sys
import time

VARIABLE = "BENCH_COMPUTE_SECONDS"
PLACE = "BENCH_COMPUTE_AT"
PLACES = ("begin", "end")


def slow_down() -> None:
    """Have every further step of this process's trainer take longer."""
    from deadpool_megatron.trainer.gpt_loop import TrainingLoop

    name = "_mean_loss" if os.environ.get(PLACE) == "end" else "train_step"
    own = getattr(TrainingLoop, name)

    def slower(loop: TrainingLoop, *arguments: object) -> object:
        time.sleep(float(os.environ[VARIABLE]))
        return own(loop, *arguments)

    setattr(TrainingLoop, name, slower)


def main(side: str, arguments: list[str]) -> int:
    """Run the trainer of a side in this process."""
    if side == "plain":
        from deadpool_megatron.megatron import stand_ins

        stand_ins.install()  # before anything imports Megatron; a member has done that
        from deadpool_megatron.trainer import plain as trainer
    else:
        from deadpool_megatron.trainer import __main__ as trainer  # type: ignore[no-redef]
    slow_down()
    return trainer.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
