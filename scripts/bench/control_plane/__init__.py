"""A real coordinator among simulated agents, for the bench ``coordinator``.

service     the coordinator's process, its warm standby, and their visible effects
watched     a program: a standby whose event loop is measured once it coordinates
agents      thousands of agents without a node
connection  one connection of a simulated agent
long_life   the journal of a run after months, and the reads of its standbys
moments     when the agents received messages
"""
