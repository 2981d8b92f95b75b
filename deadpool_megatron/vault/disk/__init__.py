"""Generations that leave the slots: dumps of a run that has to end, and what exports take."""
