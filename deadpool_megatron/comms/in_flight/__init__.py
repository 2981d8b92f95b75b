"""The operations of one epoch: how they are waited for, left, and cleared away.

attached_epoch  its flag, its operations in flight, how it is closed, and how old ones are freed
works           the Work objects that callers get, and their futures
waiters         blocking calls that can be left, threads that connect, threads of gloo that sleep
device_time     how far a device is with them, and how long its streams stand still for them
"""
