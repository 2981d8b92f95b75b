"""The parts of the case ``soak``.

faults      every kind of fault
rounds      a whole run with many faults, compared with plain training
growth      samples of processes and files, and a verdict on them
"""
