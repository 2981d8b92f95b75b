"""What is called for a layout and what it answers, line by line; see calls/."""

from tests.common.calls import test_calls_are_answered_as_before  # noqa: F401
