"""Helpers that several benches share.

command      a bench's flags, its sides in turns, its end
machine      facts about the machine, watching marked processes, the JSON file
trainings    a run to its end, observed: seconds of each step, resources used meanwhile
struck       a protected training at three sizes, with a fault where a bench asks for it
plain_ranks  a program: the trainer without protection, preloaded and forked
slow_steps   a program: the trainer, each of whose steps takes longer, as if on a device
"""
