"""Hook of mkdocs: a link from a page to a file of the repository that is no page becomes its name.

On the repository's own pages such links work; the site has pages only. A file that does not exist
is an error.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

_LINK = re.compile(r"\[([^\]]*)\]\(\.\./([^)#]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_others: Any) -> str:
    """Return the page with links to the outside replaced. Raises PluginError."""
    root = Path(config["docs_dir"]).parent

    def named(match: re.Match[str]) -> str:
        if not (root / match[2]).exists():
            raise PluginError(f"{page.file.src_path}: {match[2]} does not exist")
        return f"{match[1]} (`{match[2]}`)"

    return _LINK.sub(named, markdown)
