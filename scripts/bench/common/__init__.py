"""What several benches use.

command      a bench's flags, its sides in turns, its end
machine      facts about the machine, watching marked processes, the JSON file
trainings    a run to its end, watched: seconds of each step, what was used meanwhile
struck       one training at three sizes, protected, struck where a bench asks to
plain_ranks  a program: the trainer without protection, preloaded and forked
slow_steps   a program: the trainer, each of whose steps takes longer, as if on a device
"""
