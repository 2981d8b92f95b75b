"""Nodes come: at the start, to a new coordinator, after all had ended; and which are fit."""
