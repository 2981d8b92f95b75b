"""Hot-swap fault tolerance for hybrid-parallel Megatron training; see README.md."""

__version__ = "0.7.0"


class UserError(Exception):
    """Bad input or environment: the message is one clear line with the remedy."""
