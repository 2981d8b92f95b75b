"""The audit of silent corruption: do nodes compute, and hold, the same numbers?

audit     weights, and one role's update, around each inner update
passes    one micro-batch, forward and backward, before the passes of an iteration
shipping  what peers need to compute an update as well
verdict   which of several peers is wrong, and what a role does with that
"""
