"""Megatron-LM's own checkpoints under a session.

exact_load   load_checkpoint() such that training goes on with the very same numbers
saved_state  what save_checkpoint() writes, with marks for what an iteration changes
saves        when a checkpoint counts, and which is still owed
"""
