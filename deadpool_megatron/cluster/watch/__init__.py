"""Verdicts from observations. Pure.

hang     the role that hangs, the time limit of a hang, and a table for users
windows  nodes that are slower than the others; the cadence of protected generations
"""
