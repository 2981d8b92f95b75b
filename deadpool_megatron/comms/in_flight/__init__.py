"""The operations of one epoch: how they are waited for, left, and cleared away.

epoch    its flag, its operations in flight, and how it is closed
futures  their futures, which end with the epoch
works    the Work objects that callers get
waiters  blocking calls that can be left
stream_waits  how long streams of a device stand still for them
asleep   whether a thread of gloo sleeps, so that what it does cannot proceed
reaper   frees old epochs where blocking does no harm
"""
