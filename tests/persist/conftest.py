"""Fixtures that several test modules of exports use."""

from tests.trainer.layouts import text

__all__ = ["text"]
