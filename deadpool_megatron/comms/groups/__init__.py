"""The groups that Megatron holds, for the whole run.

group     the ProcessGroup that forwards to what stands behind it in an epoch; C++ finds another
install   makes c10d create our groups: the 'deadpool' backend
roster    all groups of a process in order: equal keys, and the map to another role's
detached  what stands behind them without peers: operations complete locally, or are refused
"""
