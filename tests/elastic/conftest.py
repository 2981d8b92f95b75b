"""Fixtures of tests whose programs train at several numbers of ranks."""

from deadpool_megatron.megatron import stand_ins
from tests.trainer.layouts import text

# Before a test of this process imports anything of Megatron.
stand_ins.install()

__all__ = ["text"]
