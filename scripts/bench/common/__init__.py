"""Helpers that several cases share.

frame        a case's flags, its sides in turns, its end
figures      rows, intervals, slopes, table and plot
machine      facts about the machine, observation of marked processes, the JSON file
trainings    a run to its end, observed: seconds of each step, resources used meanwhile
outcomes     the cost of a failure, from reported steps
struck       the training of most cases, with a fault where a case asks for it
plain_ranks  a program: the trainer without protection, preloaded and forked
slow_steps   a program: the trainer, each of whose steps takes longer, as if on a device
"""
