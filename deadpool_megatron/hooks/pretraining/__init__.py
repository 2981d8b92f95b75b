"""Megatron-LM's own training scripts under protection: ``--deadpool`` on their command line.

flags         what ``--deadpool`` adds to the command line, and what it refuses to go with
versions      which Megatron-LM this is, and whether its functions are those that are known
scene         where the marked functions of Megatron-LM lead at this moment
handlers      what they call first
program       pretrain() as a program of a session, called in passes
build         one pass up to train(): what it built
stages        which roles can use each other's model objects
loop          train() and what follows it, as a loop that a session protects
faultpoints   where tests make a process fail
iterations/   what is known and told of an iteration
megatron_checkpoints  Megatron-LM's own: when one counts, what one would hold
storage_faults        errors of the file system while it saves
"""
