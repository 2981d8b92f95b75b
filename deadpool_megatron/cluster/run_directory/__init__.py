"""The run's files, and its slots on this host.

directory       where each file is, what the next start continues from, names that may be removed
leftover_slots  the slots of a node: claimed, taken up
cleanup         processes and memory of a run on this host, and their end
bad_nodes       hosts that did wrong, over all runs of a user
"""
