"""The peers of the case ``peers``: the same training with the protection of other systems.

sides          how each side is started, struck and read; sides.toml is their table
environments   a Python environment for each peer, made on demand
rank           a program: one rank of the training without deadpool's protection
inprocess      a program: all ranks under nvidia-resiliency-ext's in-process restart
keepers        keeping the state by torch.distributed.checkpoint
lm_resiliency  keeping the state by lm-resiliency
"""
