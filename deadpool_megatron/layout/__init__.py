"""Roles, failure domains, placement of copies, and the records of decisions. Pure; no torch.

records        what decisions are made of, and the decision itself; which iterations are protected
words          the name of a group of roles, and what the bytes of a role mean, for people
history        what a coordinator that takes over must know of the run so far
planner        what is restored from where, who plays which role, the kept line
schemes        how state is protected, and the plan of an epoch
gradient_chain steps between two generations: names and rules
rebuild        which schemes can produce parts of which no whole copy is left
placement      the nodes that hold the copies of a role; which nodes are lost together
parity_groups  the roles that share parity blocks, their holders, what blocks give back
sizing         the one reckoning of memory, and the choice among plans
"""
