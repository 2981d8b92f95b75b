"""The questions to a run that continues.

status: what it does. asking: requests that change it. follow_slurm: drains that follow Slurm's.
"""
