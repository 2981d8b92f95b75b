"""Unique state: which tensors it is, how they lie in a flat buffer, how they get there and back.

Torch only; no network and no Megatron. The hooks say which tensors belong to which part.
"""
