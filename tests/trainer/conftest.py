"""Fixtures that several test modules of the trainer use."""

from tests.trainer.layouts import text

__all__ = ["text"]
