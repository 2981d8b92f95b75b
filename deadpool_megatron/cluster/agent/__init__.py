"""The supervisor of one node.

process              the life of the agent's process, and the slots of an agent that died
agent                orders, reports, loss of contact, shutdown
options              start options of the agent and of its members
members              member processes, and the reports about them to the coordinator
stacks               stacks of a member before it is killed
vault_process        supervision of the vault, and the orders to it
standby_supervisor   the standby coordinator of the node
coordinator_address  the address of the coordinator
fence                the moment at which a node that may be cut off must stop its members
exporter             this node's part in exports
node_checker         facts about the host
"""
