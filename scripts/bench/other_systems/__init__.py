"""What the bench ``peers`` compares deadpool with: the same training, kept alive by others.

sides          how each side is started, struck and read
outcomes       what a struck run lost: arithmetic on reported steps
environments   a Python environment for each peer, made on demand
rank           a program: one rank of the training without deadpool's protection
inprocess      a program: all ranks under nvidia-resiliency-ext's in-process restart
keepers        keeping the state by torch.distributed.checkpoint
lm_resiliency  keeping the state by lm-resiliency
"""
