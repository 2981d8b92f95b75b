"""A real coordinator among simulated agents, for the case ``coordinator``.

service     the coordinator's process, its warm standby, and their visible effects
agents      thousands of agents without a node
"""
