"""The table of support: items that a protected run accepts or refuses, each with a reason.

The rows are data, in ``tables/*.toml``; these modules read them:

* :mod:`.flags`: flags of Megatron-LM and their values, ``tables/flags.toml``
* :mod:`.findings`: findings on a command line and the verdict, for ``deadpool support`` and a start
* :mod:`.versions`: tested versions, ``tables/versions.toml``, and names in Megatron-LM that the
  hooks require, ``tables/names.toml``
* :mod:`.environment`: variables of NCCL and torch, versions of NCCL, ``tables/environment.toml``

An item without a row is refused, unless the user accepts it by name.
"""
