"""Hot-swap fault tolerance for hybrid-parallel Megatron training; see README.md."""

__version__ = "0.6.0"
