"""Slots in shared memory: the files, the table of a node's parts, and an offline check."""
