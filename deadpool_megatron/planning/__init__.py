"""Sizing before a run: memory, traffic, risk, spares and goodput from a file of numbers. Pure."""
