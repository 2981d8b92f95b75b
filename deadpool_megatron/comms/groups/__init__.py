"""The groups that a framework holds, for the whole run.

group     the ProcessGroup that forwards to the inner group of an epoch; has c10d create it
roster    all groups of a process in order: equal keys, and the map to the groups of another role
detached  inner groups without peers: operations complete locally, or are refused
"""
