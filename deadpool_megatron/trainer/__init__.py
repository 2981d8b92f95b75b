"""A small pretraining loop on stock megatron-core: embedded default workload and test bed."""
