"""Roles, failure domains, placement of copies, and the records of decisions. Pure; no torch.

records      what decisions are made of, and the decision itself
history      what a coordinator that takes over must know of the run so far
deltas       a record as the change of the one before
inventories  what a node holds, on the wire
planner      what is restored from where, who plays which role, the kept line
seats        who plays which role
schemes      how state is protected, and the plan of an epoch
cadence      which iterations are protected
replaying    steps between two generations: names and rules
places/      on which nodes copies and parity blocks lie
reckoning/   what a plan takes of memory and network, and the choice among plans
"""
