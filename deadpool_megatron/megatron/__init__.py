"""Megatron under protection: its state, its groups, its loops.

optimizer          optimizers' state as parts, complete before the first update, and calls around it
loop_extras        everything an iteration changes that is in no part
fp8                state that Transformer Engine keeps for training in FP8
identity           the meaning of the bytes of a role's generations, and a hash of all its state
dimensions         tensor, pipeline, data: state that peers rebuild and compare
interrupt_cleanup  remains of an interrupted step in Megatron: a table
template_maker     the recipe of a role's part of a checkpoint: which bytes lie where
exact_load         the exact load of an optimizer where PyTorch's own Adam does the updates
audit/             the search for silent corruption, at an interval of iterations
pretraining/       Megatron-LM's own scripts under protection
stand_ins          stand-ins for a GPU, on a CPU
replacement        an attribute replaced while a block runs
in_process_writer  Megatron's checkpoints, written without processes of their own
"""
