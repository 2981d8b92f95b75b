"""Hot-swap fault tolerance for hybrid-parallel Megatron training; see README.md."""

__version__ = "0.7.0"


class UserError(Exception):
    """The input or the environment is bad; the message is a line with the remedy."""
