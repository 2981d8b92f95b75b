"""The life of an epoch, phase by phase, and the end of the run. Pure functions on a Turn."""
