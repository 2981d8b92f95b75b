"""Hot-swap fault tolerance for hybrid-parallel Megatron training; see README.md."""

__version__ = "0.4.0"
