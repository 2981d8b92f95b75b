"""The questions to a run that continues.

status: what it does. asking: requests that change it.
"""
