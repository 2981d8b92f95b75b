"""Commands before a run. ``support`` judges a command line, ``plan`` computes memory and traffic,
``check`` examines this host, ``bad_nodes`` shows quarantined hosts, ``gpu_health`` looks for broken
GPUs, and ``patch`` adds the hooks to a checkout of Megatron-LM.
"""
