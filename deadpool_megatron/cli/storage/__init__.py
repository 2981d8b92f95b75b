"""Commands on the state of runs in memory and on disk: ``verify`` and ``clean``."""
