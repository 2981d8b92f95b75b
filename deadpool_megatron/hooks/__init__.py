"""The only package that touches Megatron: what it registers with the groups and the loop.

``Session`` is what a training program uses; ``Program`` and ``ProtectedLoop`` (most simply a
``SteppedLoop``) are what it provides, ``state_hash`` is what that answers for its state.

loop               what a training program provides
session            one process: takes roles, trains, leaves closed epochs, takes roles again
entry              entering an epoch: build, connect, restore, synchronise, verify one role
epoch_runner       the way of one role through an open epoch: each iteration made safe
reports            what a member says while it plays a role: own time, and of a standstill, too
dimensions         tensor, pipeline, data: what peers rebuild and compare
interrupt_cleanup  what an interrupted step leaves behind: a table
capture/           Megatron's state: captured, sealed, waited for, put back, computed again
checkpoints/       on disk: saves, state templates, loading
audit/             the search for silent corruption, every so many iterations
pretraining/       Megatron-LM's own scripts under protection
"""

from deadpool_megatron.platform import stand_ins

# Whatever a program imports first: all that follows imports megatron.core.
stand_ins.install()

from deadpool_megatron.hooks.capture.identity import state_hash
from deadpool_megatron.hooks.loop import Emit, Program, ProtectedLoop, SteppedLoop, StepRunner
from deadpool_megatron.hooks.session import Session

__all__ = ["Emit", "Program", "ProtectedLoop", "Session", "StepRunner", "SteppedLoop", "state_hash"]
