"""The test of a room's transcripts, which its ``test_calls.py`` imports; see ``transcript``."""

from tests.common import lives, statements


def test_calls_are_answered_as_before(transcript, tmp_path):
    lives.compare(transcript, statements.live, tmp_path)
