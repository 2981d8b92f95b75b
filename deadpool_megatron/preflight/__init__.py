"""Judgement of nodes: which are fit for a run? No torch.

facts: of a node, plain data. host: reads those of the host at hand. health: words on it of the
site's command and of the kernel log. gpus: who sees which. judge: facts and links -> standing.
"""
