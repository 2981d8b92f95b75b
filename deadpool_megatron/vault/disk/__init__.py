"""Generations that leave the slots.

dump             files that are written when a run has to end
sources          the parts in the files of a dump, and the check whether they are complete
extras_file      the extras of each role in a checkpoint
pinned_snapshot  a copy in memory for an export
"""
