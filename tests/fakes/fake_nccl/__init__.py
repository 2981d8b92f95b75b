"""A fake of NCCL for machines without a GPU; a run uses it for its communicators.

fake          NCCL's semantics on CPU tensors, on top of gloo
collected     the open blocks of a thread, simulated
stream_order  a device's order of memory accesses, simulated on the CPU

It is imported by its own name, as the scripts of Megatron-LM have a package ``tests`` next to them.
"""

from fake_nccl.fake import FakeNcclFabric

#: the value of ``--deadpool-communicator``
KIND = "fake_nccl:FakeNcclFabric"

__all__ = ["KIND", "FakeNcclFabric"]
