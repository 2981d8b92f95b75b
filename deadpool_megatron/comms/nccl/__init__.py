"""Groups on NCCL, and what plays NCCL where there is no GPU.

fabric        communicators, abort, the environment that recovery needs
fake          NCCL's semantics on CPU tensors, on top of gloo
stream_order  a device's order of memory accesses, played on the CPU
"""
