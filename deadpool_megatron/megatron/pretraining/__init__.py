"""Megatron-LM's own training scripts under protection: ``--deadpool`` on their command line.

pretrain_program      the flags of ``--deadpool``, its refusals; pretrain() as a program, in passes
families              the differences between its versions (:mod:`deadpool_megatron.support`)
dispatch              which handler a call of its functions reaches at this moment
build                 one pass up to train(): the objects that it made, and their arguments
stages                which roles can use each other's model objects
training_loop         train() and what follows it, as a loop that a session protects
user_buffers          those of Transformer Engine, made in each epoch
per_entry_state       profile, straggler detector and token sums, at each entry into train()
newest_iteration      the newest iteration, as far as train() has to know it
logbook               TensorBoard, W&B, the lines of training_log(): each step once
megatron_checkpoints  Megatron-LM's own: which count, which are owed, and their content
"""
