"""Hook of mkdocs: links of a page that depend on the site.

A link to a file of the repository that is no page becomes its name: on the repository's own pages
such links work, the site has pages only. A file that does not exist is an error. The first use of
each word in the tables of concepts.md becomes, on other pages, a link to its row there.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

_LINK = re.compile(r"\[([^\]]*)\]\(\.\./([^)#]+)(?:#[^)]*)?\)")
_LIST = "concepts.md"
_ROW = re.compile(r"^\| ((?!word|---)[^|]+) \|", re.MULTILINE)
# Words that pages use in their usual sense, too.
_USUAL = {"copy", "iteration", "lag", "record", "replay", "request", "scheme", "weak", "window"}
# Parts of a page in which no word becomes a link: code, headings, rows of tables, links, tags.
_FIXED = re.compile(
    r"(^```.*?^```$|^ {4}.*?$|^#.*?$|^\|.*?$|`[^`\n]*`|!?\[[^\]]*\]\([^)]*\)|<[^>\n]*>)",
    re.MULTILINE | re.DOTALL,
)


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_others: Any) -> str:
    """Return the page with links to the outside replaced, and words linked. Raises PluginError."""
    docs = Path(config["docs_dir"])

    def named(match: re.Match[str]) -> str:
        if not (docs.parent / match[2]).exists():
            raise PluginError(f"{page.file.src_path}: {match[2]} does not exist")
        return f"{match[1]} (`{match[2]}`)"

    markdown = _LINK.sub(named, markdown)
    if page.file.src_path == _LIST:
        return _ROW.sub(lambda row: f'| <a id="{_anchor(row[1])}"></a>{row[1]} |', markdown)
    return link_words(markdown, _ROW.findall((docs / _LIST).read_text()))


def link_words(markdown: str, words: list[str]) -> str:
    """Return the text with the first use of each word as a link to its row."""
    words = [word for word in words if word not in _USUAL]
    waiting = {word.lower(): word for word in words}
    any_word = re.compile(rf"\b({'|'.join(map(re.escape, words))})(s?)\b", re.IGNORECASE)

    def linked(match: re.Match[str]) -> str:
        word = waiting.pop(match[1].lower(), None)
        return f"[{match[0]}]({_LIST}#{_anchor(word)})" if word else match[0]

    parts = _FIXED.split(markdown)
    parts[::2] = [any_word.sub(linked, part) for part in parts[::2]]
    return "".join(parts)


def _anchor(word: str) -> str:
    return word.lower().replace(" ", "-")
