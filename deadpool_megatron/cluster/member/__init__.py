"""A training process's end of the line to its agent."""
