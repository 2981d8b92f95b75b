"""The tables of support: items that a protected run accepts or refuses, each with a reason.

The rows are data, in ``tables/*.toml``. These modules read them:

* :mod:`.flags`: Megatron-LM's flags and their values (``flags.toml``)
* :mod:`.findings`: findings on a command line and the verdict, for ``deadpool support`` and a start
* :mod:`.versions`: the tested versions of Megatron-LM (``versions.toml``), and the names in its
  source that the hooks require (``names.toml``)
* :mod:`.environment`: variables of NCCL and torch, and versions of NCCL (``environment.toml``)

An item without a row is refused, unless the user accepts it by name.
"""
