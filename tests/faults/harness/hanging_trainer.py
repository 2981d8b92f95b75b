"""The embedded trainer, in which one role hangs in a forward pass of its own, once.

Arguments: ROLE PASS, then those of the trainer. The process that takes its place does not hang.
"""

import itertools
import os
import sys
import threading
from typing import Any

from deadpool_megatron.cluster.process.member_place import MemberPlace
from deadpool_megatron.trainer import __main__ as trainer, gpt_loop

_forward = gpt_loop.forward_step


def hanging(role: str, last: int) -> Any:
    """The forward pass; pass number ``last`` of the first process of ``role`` does not end."""
    passes = itertools.count(1)

    def forward(*arguments: Any) -> Any:
        if os.environ["RANK"] == role and next(passes) == last:
            threading.Event().wait()
        return _forward(*arguments)

    return forward


if __name__ == "__main__":
    role, last, *rest = sys.argv[1:]
    if not MemberPlace.from_environment().incarnation:
        gpt_loop.forward_step = hanging(role, int(last))
    sys.exit(trainer.main(rest))
