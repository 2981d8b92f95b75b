"""The proof kit: what can be shown of the GPU path on one machine; see docs/gpu.md."""
