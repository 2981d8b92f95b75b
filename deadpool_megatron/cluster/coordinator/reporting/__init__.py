"""What is written of many events: digests, and where the time of the run went."""
