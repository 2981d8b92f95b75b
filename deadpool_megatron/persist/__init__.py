"""Turns a generation in host memory into a standard checkpoint, in a process of its own.

Torch on the CPU; nothing here runs in a training process but the making of the state template.

state_template   what a role writes, in boxes, where its bytes lie, and the values of an iteration
frozen_file      weights that no iteration changes; in the command without torch
writing          one role's file, and all of them as one checkpoint
__main__         one node's part of an export; Megatron's classes without Megatron
"""
