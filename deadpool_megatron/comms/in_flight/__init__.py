"""The operations of an epoch: how they are waited for, abandoned, and freed.

epoch        the flag of an epoch, its operations in flight, and its close
observation  the waits and the progress of a process, for the threads that watch it
reaper       the thread that frees old epochs
works        the Work objects that callers get, and their futures
waiters      blocking calls that can be abandoned, threads that connect, threads of gloo that sleep
device_time  the progress of a device, and the time in which its streams wait for communication
"""
