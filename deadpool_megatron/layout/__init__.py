"""Roles, failure domains, placement of copies, and the records of decisions. Pure; no torch."""
