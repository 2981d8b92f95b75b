"""How a generation is made in the training process, and made again after a failure.

layouts      what a role's generations consist of
memory       whether there is memory for them
protection   start the copy, seal behind training's back, gate the update
pinning      slots page-locked for the device
slot_views   tensors over the parts of slots
steps        what each update used, kept beside the generation that it made
replay       an update again, from the state before it and what it used
recomputing  a restore from an older generation and the updates since
"""
