"""Starts a script of Megatron-LM with the hooks, in a patched tree or not: :mod:`.__main__`."""
