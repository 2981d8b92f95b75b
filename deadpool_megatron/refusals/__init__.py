"""Flags of Megatron-LM that a protected run refuses: those with a row, and those nobody looked at.

Each flag of core_v0.16.1 is in exactly one place, and so are those of later versions that somebody
has looked at: :mod:`.refused` says what cannot be protected and what to do instead,
:mod:`.reviewed` what somebody has read and let pass, :mod:`.unreviewed` what nobody vouches for,
which the user may answer for. :mod:`.values` has the values that were read of flags that pass.
"""
