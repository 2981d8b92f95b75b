"""A run in simulated time: failures with published rates, and what each way to recover costs."""
