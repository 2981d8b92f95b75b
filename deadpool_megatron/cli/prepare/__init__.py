"""What comes before a run: will it hold, is this host fit, is Megatron-LM patched?"""
