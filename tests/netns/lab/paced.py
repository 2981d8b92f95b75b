"""The embedded trainer, whose steps each take ``NETNS_STEP_SECONDS`` longer.

Faults of a network last for seconds; on a quick machine the whole training would be over by then.
"""

import os
import sys
import time

VARIABLE = "NETNS_STEP_SECONDS"


def main() -> int:
    """Run the trainer in this member."""
    # Not at the top: in the test process the stand-ins for CUDA are not installed.
    from deadpool_megatron.trainer import __main__ as trainer
    from deadpool_megatron.trainer.gpt_loop import TrainingLoop

    own_step = TrainingLoop.train_step

    def train_step(loop: TrainingLoop) -> None:
        time.sleep(float(os.environ[VARIABLE]))
        own_step(loop)

    TrainingLoop.train_step = train_step  # type: ignore[method-assign]
    return trainer.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
