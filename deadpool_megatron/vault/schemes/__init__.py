"""The schemes that are more than copies (:mod:`..copies`), and the choice of a scheme.

registry       the scheme of an epoch record
parity         coded blocks of a group of roles: building the blocks of this node
parity_decode  decoding a part from any k blocks, of vaults or of the files of a dump
parity_code    the code: k of k + m blocks give all others
"""
