"""The state of a role: in flat buffers, as encoded bytes, and as the recipe of a checkpoint.

Torch only; no network and no Megatron. The framework's rooms decide which tensors are in which
part.

parts            live tensors with places in a flat buffer, and their fingerprint
optimizer_state  the state of a torch optimizer, whatever that is
initial_state    the state that an optimizer begins with, made before its first update
extras           the small state apart from the shard, as bytes without pickle
digest           digests of training state, by which two runs are compared
template         a role's recipe of its part of a checkpoint
frozen_file      weights that no iteration changes; usable without torch
"""
