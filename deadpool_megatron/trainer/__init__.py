"""A small pretraining loop on stock megatron-core: the default workload, and a test bed."""
