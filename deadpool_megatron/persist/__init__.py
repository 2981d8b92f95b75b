"""Turn a generation in host memory into a standard checkpoint, in a process of its own.

Torch on the CPU; nothing here runs in a training process.

torch_dist  the file of each role, and their join into a checkpoint
__main__    a node's part of an export; Megatron's classes without Megatron
"""
