"""Answers of the scripts' functions, line by line; see calls/."""

import sys
from pathlib import Path

from tests.common.calls import test_calls_are_answered_as_before  # noqa: F401

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path[:0] = [str(SCRIPTS), str(SCRIPTS / "bench"), str(SCRIPTS.parent / "tests" / "mutants")]
