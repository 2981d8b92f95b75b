"""Judgement of nodes: which are fit for a run? No torch.

judge   facts of nodes, and their standing: pure
host    the host at hand: its facts, its GPUs
health  words on it of the site's command and of the kernel log
"""
