"""The state of a role: in flat buffers, as encoded bytes, and as the recipe of a checkpoint.

These modules need torch, but no network and no Megatron. The packages of the frameworks decide
which tensors belong to which part.

parts            live tensors with places in a flat buffer, and their fingerprint
optimizer_state  the state of any torch optimizer: tensors in fixed places, and other values
initial_state    the state of an optimizer, created before its first update
extras           the small state apart from the shard, as bytes without pickle
digest           digests of training state, by which two runs are compared
template         a role's recipe of its part of a checkpoint
frozen_file      weights that no iteration changes; usable without torch
"""
