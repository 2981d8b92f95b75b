"""What is found by looking at the agents again and again: silence, hangs, slowness, RPO."""
