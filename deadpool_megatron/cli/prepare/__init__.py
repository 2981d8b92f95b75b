"""Commands before a run.

support: would it be protected? plan: can it hold? check: is this host fit? bad_nodes: quarantined
hosts. gpu_health: does a GPU fail? patch: marks the functions of Megatron-LM.
"""
