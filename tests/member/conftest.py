"""Megatron on this machine, and what several tests of a training process need."""

from deadpool_megatron.megatron import stand_ins

# The stand-ins come before the first import of anything of Megatron.
stand_ins.install()

from tests.member.session_rig import rig  # noqa: E402, F401
