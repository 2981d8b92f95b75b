"""What runs leave in memory and on disk: verified, or removed."""
