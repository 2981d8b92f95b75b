"""Questions before a run.

support: would it be protected? plan: will it hold? check: is this host fit? nodes: which hosts were
bad? patch: is Megatron-LM marked?
"""
