"""The only package that touches Megatron: what it registers with the groups and the loop.

``Session`` is what a training program uses; ``Program`` and ``ProtectedLoop`` (most simply a
``SteppedLoop``) are what it provides.
"""

from deadpool_megatron.hooks.loop import Course, Emit, Program, ProtectedLoop, SteppedLoop
from deadpool_megatron.hooks.session import Session

__all__ = ["Course", "Emit", "Program", "ProtectedLoop", "Session", "SteppedLoop"]
