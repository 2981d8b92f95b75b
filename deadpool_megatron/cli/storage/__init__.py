"""Bytes that runs leave in memory and on disk: verify (checkpoint_files: torch's), clean."""
