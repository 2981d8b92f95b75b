"""The proof kit: checks of the GPU path on one machine; see docs/testing.md."""
