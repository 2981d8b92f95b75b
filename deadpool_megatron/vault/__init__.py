"""The process on each node that holds generations in host memory and moves them between nodes.

Slots are files under /dev/shm and outlive the vault, its agent and the members. No torch here.

Each uses only those below it::

    agent_orders     the process: its threads, and the orders of the agent, which sends them by
                     control
    server           what other vaults may ask
    member_dialogue  what the members of the node ask; member is their side of it
    worker           a role that is seated here: its seals, and its restore
    restore          a part from the first place whose checksum holds
    disk             dumps of a run that has to end, and generations set aside for exports
    schemes          who is owed what: an object for each way to protect state, copies by default
    replicate        bringing sealed parts to where they are owed
    room             memory for slots, and what may be given back
    epoch_gate       what all threads share: open or closed, sealed, committed
    pace             when the next piece of a copy may go
    transport        connections of vaults
    shm              slots: files, their headers, the table of all that a node holds
    memory           how much generations may take, take, and would take
    errors           what goes wrong, and what is told of it
"""
