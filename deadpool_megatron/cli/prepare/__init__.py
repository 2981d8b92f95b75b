"""Questions before a run.

support: would it be protected? plan: will it hold? check: is this host fit? bad_nodes: which hosts
were bad? gpu_health: does a GPU fail? patch: is Megatron-LM marked?
"""
