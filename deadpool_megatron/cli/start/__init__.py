"""The start of a run, of a node of it, and of a standby.

run, agent: the commands. deriving: what a user need not say. checks: what is looked at before.
scripts: the program, and what is imported ahead. launch: all nodes of a run on one host. serving:
the life of one agent, and standby. restarting, resuming: continuing in the same directory, and from
an earlier run's.
"""
