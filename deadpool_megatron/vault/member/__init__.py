"""The part of a vault that a training process uses: its own slots, and what it restores from."""
