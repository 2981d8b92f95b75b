"""The groups that Megatron holds, for the whole run.

group     the ProcessGroup that forwards to what stands behind it in an epoch; has c10d create it
roster    all groups of a process in order: equal keys, and the map to another role's
detached  what stands behind them without peers: operations complete locally, or are refused
"""
