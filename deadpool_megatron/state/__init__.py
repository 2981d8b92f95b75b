"""Unique state: how it lies in a flat buffer, how it gets there and back.

Torch only; no network and no Megatron. The hooks say which tensors belong to which part.

packing  parts, and the fingerprint of tensors
extras   the small state besides, as bytes without pickle
"""
