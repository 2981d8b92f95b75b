"""Groups on NCCL.

fabric     communicators, and how they are aborted
warming    what NCCL loads once, loaded while there is time
timing     the clock of a GPU
blocks     coalesced operations, which come to their end whatever happens
depth      how deep a thread is in groups of NCCL
positions  how far a device is, as torch's flight recorder has it
"""
