"""What a training process uses of a vault: its own slots, and what it restores from."""
