"""The run's files, and its slots on this host."""
