"""Calls around Megatron and their results, line by line; see calls/."""

from tests.common.calls import test_calls_are_answered_as_before  # noqa: F401
