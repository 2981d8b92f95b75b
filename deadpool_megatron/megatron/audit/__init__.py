"""The audit of silent corruption: do nodes compute, and hold, the same numbers?

audit            compares weights, and the update of one role, around each inner update
pass_audit       compares the passes of one micro-batch, before the passes of an iteration
update_replay    repeats an update, from the state before it and its gradients
update_transfer  sends the data with which peers compute an update as well
comparison       finds the peers that differ from the others, and reports them
"""
