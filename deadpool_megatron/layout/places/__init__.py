"""On which nodes state is kept besides its own.

copies   the nodes that hold the copies of a role
parity   the roles that share parity blocks, and the nodes that hold these
domains  which nodes are lost together
"""
