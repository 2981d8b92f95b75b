"""Judges which nodes are fit for a run. Nothing here needs torch.

``eligibility`` judges nodes by their facts and is pure. ``host`` reads the facts and the GPUs of
this host. ``health`` asks the site's health command and reads the kernel log.
"""
