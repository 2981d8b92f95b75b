"""The life of a protected training process, whatever framework it trains with.

``Session`` is what a training program uses; ``Program`` and ``ProtectedLoop`` (most simply a
``SteppedLoop``) are what it provides.

loop               what a training program provides
session            one process: takes roles, trains, leaves closed epochs, takes roles again
entry              entering an epoch: build, connect, restore, synchronise, verify one role
epoch_runner       the way of one role through an open epoch: each iteration made safe
protection         generations: start the copy, seal behind training's back, gate the update
frozen_weights     large weights that no iteration changes are written once
reports            messages of a member that holds a role: own time, and of a standstill, too
"""

from deadpool_megatron.member.loop import Emit, Program, ProtectedLoop, SteppedLoop, StepRunner
from deadpool_megatron.member.session import Session

__all__ = ["Emit", "Program", "ProtectedLoop", "Session", "StepRunner", "SteppedLoop"]
