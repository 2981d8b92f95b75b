"""What the machine knows, as small frozen objects; nothing else decides what it does."""
