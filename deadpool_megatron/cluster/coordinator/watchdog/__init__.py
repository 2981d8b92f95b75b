"""Findings of looking at the agents again and again: silence, hangs, slowness, RPO."""
