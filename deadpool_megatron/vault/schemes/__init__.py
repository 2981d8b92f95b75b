"""The schemes that are more than copies (:mod:`..copies`), each a subclass of one class.

registry       the scheme of an epoch record
parity         coded blocks of a group of roles, and building those of this node
parity_decode  decoding a part from any k blocks of vaults, or of the files of a dump
parity_code    the code: any k of k + m
"""
