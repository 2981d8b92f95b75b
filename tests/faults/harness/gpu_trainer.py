"""The embedded trainer where each process takes a GPU as with NCCL, which is played.

Argument: NODE, then those of the trainer. The successors of that node's first processes find no
GPU.
"""

import sys
from unittest.mock import patch

from deadpool_megatron.cluster.process.member_place import MemberPlace
from deadpool_megatron.member import session
from deadpool_megatron.trainer import __main__ as trainer


def take(communicator: str, slot: int) -> str:
    """A GPU of its own, or the end of the process; communication is what was chosen."""
    place = MemberPlace.from_environment()
    is_gone = str(place.node) == NODE and place.incarnation
    error = RuntimeError("No CUDA GPUs are available") if is_gone else None
    with (
        patch("torch.cuda.init", side_effect=error),
        patch("torch.cuda.set_device"),
        patch("torch.cuda.nccl.version", return_value=(2, 28, 9)),
    ):
        _take_device("nccl", slot)
    return communicator


_take_device = session.select_device


if __name__ == "__main__":
    NODE, *rest = sys.argv[1:]
    session.select_device = take
    sys.exit(trainer.main(rest))
