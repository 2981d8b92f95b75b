"""Vaults without training, for the cases ``vault`` and ``vault_months``.

nodes     vault processes on loopback or on links of namespaces, and what their threads cost
watched   a program: a vault whose time is counted by thread and function
floor     a program: the same bytes through bare sockets, with the same two hashes
"""
