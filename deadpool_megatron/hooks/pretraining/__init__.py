"""Megatron-LM's own training scripts under protection: ``--deadpool`` on their command line."""
