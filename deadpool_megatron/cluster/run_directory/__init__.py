"""The run's files, and its slots on this host.

directory       the paths of files, the checkpoints for the next start, names that may be removed
orphaned_slots  the lock on a node's slots, and the takeover of slots without an agent
cleanup         processes and memory of a run on this host, and their removal
bad_nodes       quarantined hosts, over all runs of a user
"""
