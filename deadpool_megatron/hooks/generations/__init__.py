"""What is captured after an iteration, and put back after a failure.

optimizer    Megatron's optimizers: their state as parts, and where the gate goes
extras       everything an iteration changes that is in no part
fp8_state    what Transformer Engine keeps for training in FP8
hashing      one number for all of it: the oracle of exactness
layouts      what a role's generations consist of
memory       whether there is memory for them
protection   start the copy, seal behind training's back, gate the update
pinning      slots page-locked for the device
steps        what each update used, kept beside the generation that it made
replay       an update again, from the state before it and what it used
recomputing  a restore from an older generation and the updates since
"""
