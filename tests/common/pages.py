"""The generator of the pages of reference (docs/site_reference.py), as a module."""

import importlib.util
from pathlib import Path
from types import ModuleType

DOCS = Path(__file__).parents[2] / "docs"


def site_reference() -> ModuleType:
    """Load it from its file, as mkdocs does."""
    found = importlib.util.spec_from_file_location("site_reference", DOCS / "site_reference.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module
