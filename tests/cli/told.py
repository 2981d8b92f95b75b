"""The types of the fixtures of conftest.py, for signatures."""

from collections.abc import Callable

# Arguments of a command -> exit status, output, errors.
CarryOut = Callable[..., tuple[int, str, str]]
# Arguments of a command that is refused -> its line.
Complain = Callable[..., str]
