"""The only package that touches Megatron: what it registers with the groups and the loop.

``Session`` is what a training program uses; ``Program`` and ``ProtectedLoop`` (most simply a
``SteppedLoop``) are what it provides.

loop             what a training program provides
reports          what a member says while it plays a role
capture/         Megatron's state: captured, sealed, waited for, put back, computed again
leftovers        what an interrupted step leaves behind: a table
dimensions/      tensor, pipeline, data: what each rebuilds and compares
audit/           the search for silent corruption, every so many iterations
checkpoints/     on disk: saves, skeletons, loading
process/         the life of a process: session, entry into an epoch, course through it
pretraining/     Megatron-LM's own scripts under protection
"""

from deadpool_megatron.hooks.loop import Course, Emit, Program, ProtectedLoop, SteppedLoop
from deadpool_megatron.hooks.process.session import Session

__all__ = ["Course", "Emit", "Program", "ProtectedLoop", "Session", "SteppedLoop"]
