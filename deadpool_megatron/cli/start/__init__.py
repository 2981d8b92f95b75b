"""The start of a run, of a node, and of a standby.

run, node_agent: the commands. defaults: values that a user may leave out. preconditions: checks
before anything starts. scripts: the program, and the modules that are imported ahead. launch: all
nodes of a run on a host. agent_process: that of an agent, and standby. restart, resume:
continuing in the same directory, and from that of an earlier run.
"""
