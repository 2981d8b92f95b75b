"""The embedded trainer, made slow on one node: every forward pass there sleeps.

Arguments: NODE SECONDS, then those of the trainer.
"""

import sys
import time
from typing import Any

from deadpool_megatron.cluster.process.member_place import MemberPlace
from deadpool_megatron.trainer import __main__ as trainer, gpt_loop

_forward = gpt_loop.forward_step


def slow(seconds: float) -> Any:
    """The forward pass with a sleep before it."""

    def forward(*arguments: Any) -> Any:
        time.sleep(seconds)
        return _forward(*arguments)

    return forward


if __name__ == "__main__":
    node, seconds, *rest = sys.argv[1:]
    if str(MemberPlace.from_environment().node) == node:
        gpt_loop.forward_step = slow(float(seconds))
    sys.exit(trainer.main(rest))
