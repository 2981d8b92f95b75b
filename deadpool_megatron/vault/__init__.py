"""The process on each node that holds generations in host memory and moves them between nodes.

Slots are files under /dev/shm and outlive the vault, its agent and the members. No torch here.
"""
