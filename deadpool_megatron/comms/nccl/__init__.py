"""Groups on NCCL, and what plays NCCL where there is no GPU.

fabric        communicators, and how they are aborted
warming       what NCCL loads once, loaded while there is time
timing        the clock of a GPU
blocks        coalesced operations, which come to their end whatever happens
fake          NCCL's semantics on CPU tensors, on top of gloo
collected     a thread's open blocks, played
stream_order  a device's order of memory accesses, played on the CPU
"""
