"""Fixtures that several test modules of the trainer use.

The stand-ins come before the first import of anything of Megatron, also where a test of arguments
is the first to import some of it.
"""

from deadpool_megatron.megatron import stand_ins
from tests.trainer.layouts import text

stand_ins.install()

__all__ = ["text"]
