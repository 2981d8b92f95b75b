"""Bytes that runs leave in memory and on disk: verifying, clean."""
