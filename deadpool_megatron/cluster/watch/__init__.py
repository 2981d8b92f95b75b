"""Verdicts from what is observed: pure."""
