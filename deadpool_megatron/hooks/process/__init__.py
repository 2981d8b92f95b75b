"""The life of one process of a run.

session      takes roles, trains, leaves closed epochs, takes roles again
entry        entering an epoch: build, connect, restore, synchronise, verify one role
course       the way through an open epoch: iterations and segments, each made safe
own_time     how long a role works without waiting for others
"""
