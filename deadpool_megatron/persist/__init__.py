"""Turns a generation in host memory into a standard checkpoint, in a process of its own.

Torch on the CPU; nothing here runs in a training process but the making of the skeleton's file.
``boxes``, ``skeleton``: what a role writes, and where its bytes lie; ``filling``: the values of an
iteration; ``frozen_file``, ``frozen_folder``: weights that no iteration changes; ``writing``: one
role's files; ``joining``: the files of all roles as one checkpoint.
"""
