"""Local processes: start, name, watch, end."""
