"""The one table of support: what a protected run may be given, and what not, with a reason each.

The rows are data, in ``tables/*.toml``; these modules read them:

* :mod:`.flags`: flags of Megatron-LM and their values, ``tables/flags.toml``
* :mod:`.findings`: findings on a command line and the verdict, for ``deadpool support`` and a start
* :mod:`.versions`: versions that were tried, ``tables/versions.toml``, and names in Megatron-LM
  that the hooks rely on, ``tables/names.toml``
* :mod:`.environment`: variables of NCCL and torch, versions of NCCL, ``tables/environment.toml``

What stands in no row is refused, unless the user answers for it.
"""
