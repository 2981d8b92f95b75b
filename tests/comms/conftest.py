"""Megatron on this machine: its stand-ins come before the first import of anything of it."""

from deadpool_megatron.megatron import stand_ins

stand_ins.install()
