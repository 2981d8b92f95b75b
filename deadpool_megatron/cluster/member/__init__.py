"""A training process's end of the line to its agent, and the pause that is ordered on it."""
