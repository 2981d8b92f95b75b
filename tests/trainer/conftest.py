"""Fixtures that several test modules of the trainer use.

The stand-ins come before the first import of anything of Megatron, also where a test of arguments
is the first to import some of it.
"""

from deadpool_megatron.platform import select_platform
from tests.trainer.layouts import text

select_platform().install()

__all__ = ["text"]
