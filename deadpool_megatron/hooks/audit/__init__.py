"""The audit of silent corruption: do nodes compute, and hold, the same numbers?

audit     weights, and one role's update, around each inner update
passes    one micro-batch, forward and backward, before the passes of an iteration
shipping  what peers need to compute an update as well
hardware  what a role computes on; bytes are compared where it is the same
rerun     what Megatron's own search must not see of it
verdict   which of several peers is wrong; pure
outcome   what a role does with a verdict
"""
