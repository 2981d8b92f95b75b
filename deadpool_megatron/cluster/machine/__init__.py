"""Decisions of the coordinator, pure: an input and a moment in, actions out.

| file | what is in it |
| --- | --- |
| machine | the class: inputs to their topics, deadlines, the first state of a run or a successor |
| inputs, actions | what comes in and what goes out, typed |
| state | what is known: nodes, members, memory, the line, the phases; data and look-ups |
| core | the state and the input at hand, as every topic has them |
| bootstrap | nodes come and are judged, the first epoch |
| takeover | another coordinator continues a run |
| membership | nodes are lost or given up, the life of member processes |
| epoch | closed, decided, opened |
| pauses | all stand still at one iteration: drains, other protection, a dump |
| chosen_plan | which plan the next record has, whether memory is enough for it |
| requests | what users ask |
| faults | what roles report, or is seen of them, of what is wrong |
| blame | causes, suspicions, bytes that must not be counted on |
| recoveries | the seconds of a recovery |
| ending | the dump, the result, the leave-taking |
"""
