"""A role's parts as whole copies on other nodes: sent, and taken in."""
