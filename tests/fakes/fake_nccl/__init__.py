"""A player of NCCL where there is no GPU; a run takes it for its communicators under a fault plan.

fake          NCCL's semantics on CPU tensors, on top of gloo
collected     a thread's open blocks, played
stream_order  a device's order of memory accesses, played on the CPU

Found by its own name: the scripts of Megatron-LM have a package ``tests`` beside them.
"""

from fake_nccl.fake import FakeNcclFabric

#: the value of ``--deadpool-communicator``
KIND = "fake_nccl:FakeNcclFabric"

__all__ = ["KIND", "FakeNcclFabric"]
