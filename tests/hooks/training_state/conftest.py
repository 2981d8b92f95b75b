"""What tests of the training state have in common."""

from tests.trainer.layouts import text

__all__ = ["text"]
