"""A role's shards as coded blocks on other nodes: made of a group's shares, and decoded."""
