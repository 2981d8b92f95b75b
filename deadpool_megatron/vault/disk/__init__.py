"""Generations that leave the slots.

dump     written when a run has to end
sources  what the files of a dump give, and whether that is all
pinned_snapshot  set aside for an export
"""
