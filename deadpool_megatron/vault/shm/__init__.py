"""Slots in shared memory: files, what they hold, in which order they are written and read."""
