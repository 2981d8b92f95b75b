"""Decisions of the coordinator, pure: an input and a time in, actions out.

| file | contents |
| --- | --- |
| machine | the class: routes inputs, keeps deadlines, begins a run or a takeover |
| inputs, actions | the inputs and the outputs, typed |
| state | the knowledge: nodes, members, memory, the lineage, the phases; data and look-ups |
| core | the state and the current input, as each topic sees them |
| bootstrap | nodes join and are checked; the first epoch |
| takeover | a new coordinator continues a run |
| membership | the loss of nodes, the life of member processes |
| epoch | the close, the decision and the opening of an epoch |
| elasticity | the sizes that the run may have, and the change to another |
| pauses | all members pause at the same iteration: drains, other protection, a dump |
| chosen_plan | the plan of the next record, and whether memory is enough for it |
| requests | the requests of users |
| faults | faults that roles report, or that are observed |
| blame | causes, suspicions, bytes that must not be trusted |
| recoveries | the seconds of a recovery |
| shutdown | the dump, the result, the agents' departure |
"""
