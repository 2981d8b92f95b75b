"""Verdicts from what is observed: pure.

hang     the role that hangs, the time after which it does, and a table for eyes
windows  nodes that are slower than the others; how far apart protected generations may be
"""
