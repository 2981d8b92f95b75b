"""What others see of a run: metrics, the account of its time. Fed by events and status alone."""
