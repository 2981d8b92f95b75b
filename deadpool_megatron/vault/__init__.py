"""The process on each node that holds generations in host memory and moves them between nodes.

Slots are files under /dev/shm and outlive the vault, its agent and the members. Nothing here
imports torch.

Each module uses only the modules below it::

    agent_orders       the vault process: its threads, and the orders that the agent sends through
                       control
    peer_server        requests of other vaults
    member_connection  requests of the node's members; vault_client is the member's side
    role_worker        seals and restore of a role that is seated here
    restore            each part of a role, from the first source whose checksum matches
    disk               dumps of a run that has to end, and generations pinned for exports
    schemes            the ways to protect state: which parts are owed to which nodes
    replicate          sending sealed parts to the nodes that must hold them
    slot_memory        memory for slots, and its release
    slot_store         the slots of this node, and every way for a part to be sealed
    commit_ledger      acknowledgements of copies, and commits
    epoch_gate         the epoch that is open
    lanes              the addresses of this node, from which it connects to other vaults
    copies             the schemes that are made of copies
    shared_nic         the pace of copies, which yields to the traffic of training
    transport          connections of vaults
    shm                slots: files, their headers, the table of all slots of a node
    memory             the memory for generations: limits, use, reservations
    errors             errors, and how they are reported
"""
