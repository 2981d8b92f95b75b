"""The process on each node that holds generations in host memory and moves them between nodes.

Slots are files under /dev/shm and outlive the vault, its agent and the members. No torch here.

Each uses only those below it::

    agent_orders       the process: its threads, and the orders of the agent, which sends them by
                       control
    peer_server        requests of other vaults
    member_connection  requests of the node's members; vault_client is their side of it
    role_worker        a role that is seated here: its seals, and its restore
    restore            a part from the first place whose checksum holds
    disk               dumps of a run that has to end, and generations pinned for exports
    schemes            an object for each way to protect state: which parts are owed to which nodes
    replicate          sending sealed parts to the nodes that must hold them
    slot_memory        memory for slots, and its release
    slot_store         the slots of this node, and every way for a part to be sealed
    commit_ledger      acknowledgements of copies, and commits
    epoch_gate         the epoch that is open
    copies             the schemes that are made of copies
    shared_nic         the moment at which the next piece of a copy may be sent
    transport          connections of vaults
    shm                slots: files, their headers, the table of all slots of a node
    memory             the memory for generations: limits, use, reservations
    errors             errors, and how they are reported
"""
