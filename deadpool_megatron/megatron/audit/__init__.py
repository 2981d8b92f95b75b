"""The audit of silent corruption: do nodes compute, and hold, the same numbers?

audit            weights, and one role's update, around each inner update
pass_audit       one micro-batch, forward and backward, before the passes of an iteration
update_replay    the replay of an update, from the state before it and its input
update_transfer  the data with which peers compute an update as well
comparison       which peers differ from the others, and what a role does about it
"""
