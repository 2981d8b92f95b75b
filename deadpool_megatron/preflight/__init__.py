"""Checks of every node before roles are given: facts, clocks, links, and a verdict. No torch."""
