"""The life of a protected training process, whatever framework it trains with.

``Session`` is the entry for a training program, which provides a ``Program`` and a
``ProtectedLoop`` (most simply a ``SteppedLoop``).

loop               the interface of a training program
framework          the seam to the training framework
session            one process: takes roles, trains, leaves closed epochs, takes roles again
member_device      the device of the process, and its kind of communicator
entry              the entry into an epoch: build, connect, restore, synchronise, verify one role
epoch_runner       the iterations and segments of one role in an open epoch, protected
protection         generations: start the copy, seal it in a helper thread, gate the update
role_layout        the layout of a role's generations, from its parts
frozen_weights     large weights that no iteration changes, written once
peer_comparison    tensors that peers must hold equal
role_reports       messages of a member that holds a role
own_time           the time that a role needs for an iteration by itself
hang_probe         the groups for which a stalled member waits
"""

from deadpool_megatron.member.loop import Emit, Program, ProtectedLoop, SteppedLoop, StepRunner
from deadpool_megatron.member.session import Session

__all__ = ["Emit", "Program", "ProtectedLoop", "Session", "StepRunner", "SteppedLoop"]
