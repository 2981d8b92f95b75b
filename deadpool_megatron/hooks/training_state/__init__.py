"""What of Megatron's state is captured after an iteration, and put back after a failure.

optimizer  Megatron's optimizers: their state as parts, and where the gate goes
sharing    peers that hold the same state capture a part of it each
extras     everything an iteration changes that is in no part
fp8_state  what Transformer Engine keeps for training in FP8
loss_sums  Megatron's sums of losses that are only logged
hashing    one number for all of it: the oracle of exactness
"""
