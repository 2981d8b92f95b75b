"""Imported early by starters of members: notes the environment in which it is imported, and an
interpreter that is torn down with it."""

import atexit
import json
import os
from pathlib import Path

Path(os.environ["EARLY_LOOKS"], str(os.getpid())).write_text(json.dumps(dict(os.environ)))
# Triton prints its leaks there, on the user's terminal.
atexit.register(Path(os.environ["EARLY_LOOKS"], "torn down").touch)
