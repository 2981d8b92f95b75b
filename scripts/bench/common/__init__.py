"""What several benches use.

machine      facts about the machine, watching marked processes, the JSON file
plain_ranks  a program: the trainer without protection, preloaded and forked
slow_steps   a program: the trainer, each of whose steps takes longer, as if on a device
"""
