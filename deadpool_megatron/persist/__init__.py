"""Turns a generation in host memory into a standard checkpoint, in a process of its own.

The process needs torch on the CPU only; nothing here runs in a training process. ``torch_dist``
writes the file of each role and joins the files into a checkpoint. ``__main__`` writes a node's
part of an export, with stand-ins for Megatron's classes.
"""
