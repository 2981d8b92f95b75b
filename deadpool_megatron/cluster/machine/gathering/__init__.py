"""Nodes come: at the start, to a new coordinator, after all had ended; which of them are fit."""
