"""Questions before a run.

plan: will it hold? check: is this host fit? nodes: which hosts were bad? patch: is Megatron-LM
marked?
"""
