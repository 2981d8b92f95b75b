"""Roles, failure domains, placement of copies, and the records of decisions. Pure; no torch.

ranks          the number of a role, which encodes its rank and the size of its run
grid           Megatron's numbering of ranks, and the groups and slices of the model
sizes          the numbers of model replicas with which a run can continue
records        facts for decisions, and the decision itself; which iterations are protected
descriptions   the name of a group of roles, and the meaning of a role's bytes, for users
history        facts about the run so far for a coordinator that takes over
planner        sources of a restore, the assignment of roles, the kept lineages
shard_map      the elements in a role's parts, and how parts of another size are cut from them
schemes        the ways to protect state, and the plan of an epoch
placement      the nodes that hold the copies of a role; which nodes are lost together
parity_groups  the roles that share parity blocks, their holders, recovery from blocks
memory_needs   the only calculation of memory, and the check of plans
"""
