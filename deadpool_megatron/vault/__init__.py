"""The process on each node that holds generations in host memory and moves them between nodes.

Slots are files under /dev/shm and outlive the vault, its agent and the members. No torch here.

The rooms; each uses only those below it::

    service     the process: its threads, and the orders of the agent, which sends them by control
    server      what other vaults may ask
    role        a role that is seated here: its seals, its restore, the dialogue with its member
    disk        dumps of a run that has to end, and generations set aside for exports
    schemes     who is owed what: an object for each way to protect state, copies by default
    replicate   bringing sealed parts to where they are owed
    core        what all threads share: the gate, what is committed, room
    pace        when the next piece of a copy may go
    member      what a training process uses       net       connections of vaults, links of a node
    shm         slots: files, their headers, the table of all that a node holds
    memory      how much generations may take, take, and would take
    processors  where the vault's threads run
"""
