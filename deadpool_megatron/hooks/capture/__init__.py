"""Megatron's state: when it is captured after an iteration, what of it, and how it is put back.

protection       start the copy, seal behind training's back, gate the update
optimizer        Megatron's optimizers: their state as parts, and where the gate goes
first_state      what they begin with, made before their first update
megatron_extras  everything an iteration changes that is in no part
fp8              what Transformer Engine keeps for training in FP8
identity         what the bytes of a role's generations mean, and one number for all of its state
update_replay    an update again, from the state before it and what it used
step_keeper      what each update used, kept and replayed: loaded by the scheme recompute alone
"""
