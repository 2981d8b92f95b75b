"""Megatron under protection: its state, its groups, its loops.

optimizer          their state as parts, complete before the first update, and the calls around it
loop_extras        everything an iteration changes that is in no part
fp8                what Transformer Engine keeps for training in FP8
identity           what the bytes of a role's generations mean, and one number for all of its state
dimensions         tensor, pipeline, data: what peers rebuild and compare
interrupt_cleanup  what an interrupted step leaves in Megatron: a table
update_replay      an update again, from the state before it and what it used
step_keeper        what each update used, kept and replayed: loaded by the scheme recompute alone
template_maker     the recipe of a role's part of a checkpoint: which bytes lie where
exact_load         loads an optimizer exactly where PyTorch's own Adam does the updates
audit/             the search for silent corruption, at an interval of iterations
pretraining/       Megatron-LM's own scripts under protection
stand_ins          stand-ins for a GPU, on a CPU
replacement        an attribute replaced while a block runs
in_process_writer  Megatron's checkpoints, written without processes of their own
"""
