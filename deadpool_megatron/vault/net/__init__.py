"""Connections: between vaults, and of a vault with the members and the agent of its node."""
