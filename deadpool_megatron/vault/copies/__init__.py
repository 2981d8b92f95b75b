"""A role's parts as whole copies: sent to other nodes and taken in, or kept on the own one."""
