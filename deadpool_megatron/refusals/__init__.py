"""Flags of Megatron-LM that a protected run refuses: those with a row, and those nobody looked at.

Each flag of the supported parser is in exactly one place: :mod:`.refused` says what cannot be
protected and what to do instead, :mod:`.reviewed` what somebody has read and let pass,
:mod:`.unreviewed` what nobody vouches for, which the user may answer for.
"""
