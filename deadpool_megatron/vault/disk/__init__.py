"""Generations that are copied out of the slots, to disk or for an export.

dump             files that are written when a run has to end
sources          the parts in the files of a dump, and the check whether they are complete
extras_file      the extras of each role in a checkpoint
pinned_snapshot  a copy in memory for an export
"""
