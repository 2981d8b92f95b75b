"""The supervisor of one node.

process              the life of its process; what an agent that died has left
agent                orders and reports, cut and end
options              what it is started with, and how its members are
members              member processes, and what the coordinator is told of them
evidence             stacks and NCCL's word, before a kill
vault_process        the vault's care, and the orders to it
standby_supervisor   the standby coordinator of the node
coordinator_address  where the coordinator is
fence                when a node that may be cut off must stop its members
exporter             this node's part in exports
node_checker         facts of the host
"""
