"""The start of a run, of one of its nodes, and of a standby.

run, node_agent: the commands. defaults: values that a user may leave out. preconditions: checks
before anything starts. scripts: the program, and the modules that are imported ahead. launch: all
nodes of a run on one host. agent_process: one agent, and standby. restart, resume: continuing in
the same directory, and from an earlier run's.
"""
