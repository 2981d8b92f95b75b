"""Groups on NCCL.

fabric           communicators: how they are made, warmed up and aborted
blocks           coalesced operations, which come to their end whatever happens
device_progress  how far a device is, as torch's flight recorder has it, and its clock
"""
