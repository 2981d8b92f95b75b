"""Processes beside the members: how they are started, and who cares for each of them."""
