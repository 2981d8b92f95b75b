"""Megatron-LM's own training scripts under protection: ``--deadpool`` on their command line.

pretrain_program      the flags of ``--deadpool``, and their refusals; pretrain() as a program
families              differences between versions of Megatron-LM (:mod:`deadpool_megatron.support`)
dispatch              sends calls of Megatron-LM's functions to the handlers in use
build                 one pass of pretrain() up to train(): its objects, and their iterators
stages                which roles can use each other's model objects
training_loop         train() and the end of pretrain(), as a loop that a session protects
user_buffers          Transformer Engine's user buffers, made in each epoch
per_entry_state       profile, straggler detector and token sums, at each entry into train()
newest_iteration      the results of the newest iteration, with which train() is entered again
logbook               TensorBoard, W&B, the lines of training_log(): each step once
megatron_checkpoints  Megatron-LM's own checkpoints: which count, which are owed, their content
"""
