"""Decisions of the coordinator, pure: an input and a time in, actions out.

| file | contents |
| --- | --- |
| machine | the class: inputs to their topics, deadlines, the first state of a run or a successor |
| inputs, actions | the inputs and the outputs, typed |
| state | the knowledge: nodes, members, memory, the lineage, the phases; data and look-ups |
| core | the state and the input at hand, as each topic sees them |
| bootstrap | nodes join and are judged, the first epoch |
| takeover | another coordinator continues a run |
| membership | nodes are lost or given up, the life of member processes |
| epoch | closed, decided, opened |
| pauses | all members pause at the same iteration: drains, other protection, a dump |
| chosen_plan | the plan of the next record, and whether memory is enough for it |
| requests | the requests of users |
| faults | faults that roles report, or that are observed |
| blame | causes, suspicions, bytes that must not be trusted |
| recoveries | the seconds of a recovery |
| ending | the dump, the result, the agents' departure |
"""
