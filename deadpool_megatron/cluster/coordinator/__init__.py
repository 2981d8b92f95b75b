"""The service that decides for the run.

service      connections, the machine's actions; the life of the process
context      what the parts below share
stepper      inputs of the machine, one after the other
garbage      search for cyclic garbage
orders       actions as messages, to each agent its part
progress     what members report: each step once, divergence, how all ended
files        what the run writes of itself: events, result, bad nodes
checkpoints  one course: asked, set aside, written, valid, removed
export_interval  which iterations are exported, and when each is ordered
durable      a checkpoint's name: one rename, owner, what may be pruned
watchdog     silence, hangs, slow nodes, cadence
commands     what users are shown, and their requests
succession   what a coordinator begins with
standby      watches the journal beside an agent, and takes over
run_end      the result, and the leave of the agents
"""
