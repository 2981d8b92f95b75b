"""A real coordinator among simulated agents, for the bench ``coordinator``.

service     the coordinator's process, the warm standby behind it, and what is seen of them
watched     a program: a standby whose loop is watched once it coordinates
agents      thousands of agents without a node
connection  one connection of a simulated agent
long_life   what a run has gathered after months, and what its standbys do about it
moments     when the agents heard of what
"""
