"""Megatron-LM's own training scripts under protection: ``--deadpool`` on their command line.

attach                what ``--deadpool`` adds and refuses; pretrain() as a program, in passes
families              what differs between its versions (:mod:`deadpool_megatron.support`)
scene                 what its functions do at this moment
build                 one pass up to train(): what it built, of which arguments
stages                which roles can use each other's model objects
training_loop         train() and what follows it, as a loop that a session protects
user_buffers          those of Transformer Engine, made in each epoch
entered               what train() starts at each entry, and does so once
iteration             the newest one, as far as train() has to know it
logbook               TensorBoard, W&B, the lines of training_log(): each step once
megatron_checkpoints  Megatron-LM's own: when one counts, what costs one, what one would hold
"""
