"""Bytes that runs leave in memory and on disk: verify, clean."""
