"""Verdicts from what is observed: pure.

hang          the role that hangs, and the time after which it does
hang_table    the roles that wait, as a table for eyes
slowness      nodes that are slower than the others
cadence_rule  how far apart protected generations may be
"""
