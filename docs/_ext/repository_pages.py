"""Sphinx extension: show documents from the root of the repository in the site, and make links to them work.

A page of the site whose only line is `# file: NAME` shows that document. In all pages a link to such a document leads
to its page. A link to another file of the repository, outside the site, becomes the file's name.
"""

import functools
import os
import re
from pathlib import Path

from sphinx.application import Sphinx

_LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s:]+)(#[^)]*)?\)")
_SHOWS = re.compile(r"# file: (\S+)\s*")


def setup(app: Sphinx) -> dict[str, bool]:
    """Register with Sphinx."""
    app.connect("source-read", read_page)
    return {"parallel_read_safe": True}


def read_page(app: Sphinx, name: str, source: list[str]) -> None:
    """Replace a page that names a document by that document, and resolve its links."""
    docs = Path(app.srcdir)
    shown = _SHOWS.fullmatch(source[0])
    path = docs / f"{name}.md"
    if shown:
        path = docs.parent / shown[1]
        source[0] = path.read_text()
        app.env.note_dependency(str(path))
    pages = _documents(docs)

    def resolve(link: re.Match[str]) -> str:
        text, target, fragment = link[1], link[2], link[3] or ""
        wanted = Path(os.path.normpath(path.parent / target))
        found = pages.get(str(wanted.relative_to(docs.parent)), wanted)
        if not found.is_relative_to(docs) or found.relative_to(docs).parts[0] in app.config.exclude_patterns:
            return text
        return f"[{text}](/{found.relative_to(docs)}{fragment})"

    source[0] = _LINK.sub(resolve, source[0])


@functools.cache
def _documents(docs: Path) -> dict[str, Path]:
    """Return the pages that name a document, by its name. A build reads all pages, so it asks for each of them."""
    return {match[1]: page for page in docs.rglob("*.md") if (match := _SHOWS.fullmatch(page.read_text()))}
