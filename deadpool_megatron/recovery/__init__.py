"""The linear sequence that every member runs after a decision: ``sequence``."""
