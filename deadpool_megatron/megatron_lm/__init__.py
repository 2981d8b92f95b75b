"""Starts a script of Megatron-LM with the hooks in it, patched or not; see :mod:`.__main__`."""
