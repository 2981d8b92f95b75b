"""The supervisor of one node.

process          the life of its process; what an agent that died has left
agent            orders and reports, cut and end
options          what it is started with, and how its members are
members          member processes, and what the coordinator is told of them
evidence         stacks and NCCL's word, before a kill
vault_process    the vault's care, and the orders to it
contact          its standby, where the coordinator is, and when it must stop its members
exporter         this node's part in exports
node_check       facts of the host
"""
