"""Megatron under protection: its state, its groups, its loops.

optimizer          the state of optimizers as parts, and calls around their updates
loop_extras        all state that an iteration changes and no part holds
fp8                state that Transformer Engine keeps for training in FP8
identity           the meaning of the bytes of a role's generations, and a hash of all its state
dimensions         tensor, pipeline, data: state that peers rebuild and compare
interrupt_cleanup  removes the remains of an interrupted step from Megatron's objects
template_maker     the template of a role's part of a checkpoint: which bytes lie where
exact_load         the exact load of an optimizer where PyTorch's own Adam does the updates
audit/             the search for silent corruption, at an interval of iterations
pretraining/       Megatron-LM's own scripts under protection
stand_ins          stand-ins for a GPU, on a CPU
replacement        replaces attributes while a block runs
in_process_writer  writes Megatron's checkpoints without additional processes
"""
