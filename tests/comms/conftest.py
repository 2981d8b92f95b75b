"""Megatron on this machine: its stand-ins come before the first import of anything of it."""

from deadpool_megatron.platform import select_platform

select_platform().install()
