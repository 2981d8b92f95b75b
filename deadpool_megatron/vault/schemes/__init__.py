"""The schemes, each an object behind one class that the rest of the vault asks.

scheme         the class; copies, the default; what stays on the own node: once, or twice
parity         coded blocks of a group of roles, and making those that are held here
parity_decode  a part out of any k blocks, of vaults or of the files of a dump
parity_code    the code: any k of k + m
gradients      generations that travel as the steps that lead to them
"""
