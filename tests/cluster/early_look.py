"""Imported ahead by whoever starts members: notes the environment in which it is imported."""

import json
import os
from pathlib import Path

Path(os.environ["EARLY_LOOKS"], str(os.getpid())).write_text(json.dumps(dict(os.environ)))
