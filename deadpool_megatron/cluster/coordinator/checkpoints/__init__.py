"""Checkpoints on the disk: what the roles save and what is exported beside the training."""
