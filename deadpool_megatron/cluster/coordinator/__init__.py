"""The coordinator: the service that decides for the run.

service      connections, the machine's actions; the life of the process
context      facts and services that the parts below share
stepper      inputs of the machine, one after the other
garbage      search for cyclic garbage
orders       actions as messages, to each agent its part
progress     reports of members: each step once, divergence, exits
files        files that the run writes about itself: events, result, bad nodes
checkpoints  the life of a checkpoint: requested, pinned, written, valid, removed
export_interval  which iterations are exported, and when each is ordered
new_checkpoint   how a checkpoint becomes valid: sync, rename, owner, pruning
watchdog     silence, hangs, slow nodes, cadence
commands     the status for users, and their requests
succession   the state from which a coordinator starts
standby      watches the journal next to an agent, and takes over
run_end      the result, and the dismissal of the agents
"""
