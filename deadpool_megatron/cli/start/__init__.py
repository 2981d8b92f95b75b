"""The start of a run, of a node, and of a standby.

``run`` and ``node_agent`` are the commands. ``defaults`` completes their options, ``preconditions``
checks everything before a process starts, and ``scripts`` determines the program of the members.
``launch`` starts all nodes of a run on a host, ``agent_process`` serves as an agent or a standby.
``restart`` continues a run in its own directory, ``resume`` in a new directory.
"""
