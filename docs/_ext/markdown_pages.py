"""Sphinx extension: put each page into the site as Markdown, too, and list all in `llms.txt`, for programs that read.

The Markdown of `how-to/pub.html` is `how-to/pub.md`. `llms.txt` has the form of https://llmstxt.org: a title, a
summary, and lists of links with a sentence each, from the tables of the index pages.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from sphinx.application import Sphinx

_SECTIONS = {
    "How-to guides": "how-to/index",
    "Cookbook": "cookbook/index",
    "Reference": "reference/index",
    "Commands": "reference/commands/index",
    "Explanation": "explanation/index",
    "Optional": "project/index",
}
"""The index page of each section. Readers may leave out those of the last one."""
_ROOT_LINK = re.compile(r"\]\(/([^)\s]+)")
_ROW = re.compile(r"^\| \[[^\]]+\]\(([^)#\s]+)\.md\) \| (.+) \|$", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")


def setup(app: Sphinx) -> dict[str, bool]:
    """Register with Sphinx."""
    app.connect("build-finished", write_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def write_pages(app: Sphinx, exception: Exception | None) -> None:
    """Write the pages and `llms.txt`, after a build of HTML."""
    if exception is not None or app.builder.format != "html":
        return
    texts = {name: _markdown(app, name) for name in sorted(app.env.found_docs)}
    for name, text in texts.items():
        path = Path(app.outdir, f"{name}.md")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    Path(app.outdir, "llms.txt").write_text("\n".join(_list(app, texts)) + "\n")


def _markdown(app: Sphinx, name: str) -> str:
    """Return a page with links that are relative to it."""
    source = [Path(app.srcdir, f"{name}.md").read_text()]
    app.emit(
        "source-read", name, source
    )  # resolves links, and shows documents from elsewhere in the repository
    folder = PurePosixPath(name).parent

    def relative(link: re.Match[str]) -> str:
        return f"]({os.path.relpath(link[1], folder)}"

    return _ROOT_LINK.sub(relative, source[0])


def _list(app: Sphinx, texts: dict[str, str]) -> Iterator[str]:
    yield "# trio-nsq\n"
    summary = " ".join(texts["index"].split("\n\n")[1].split())
    yield f"> {_without_links(summary)}\n"
    yield "`qcli help --format json` describes all commands: arguments, options, types, exit codes, effects.\n"
    yield "- [Tutorial](tutorial.md)\n- [Glossary](glossary.md)"
    for heading, index in _SECTIONS.items():
        yield f"\n## {heading}\n"
        folder = PurePosixPath(index).parent
        about = {os.path.normpath(folder / row[1]): row[2] for row in _ROW.finditer(texts[index])}
        for name in app.env.toctree_includes[index]:
            if not name.endswith("/index"):
                text = _without_links(about.get(name, ""))
                yield f"- [{app.env.titles[name].astext()}]({name}.md)" + (f": {text}" if text else "")


def _without_links(text: str) -> str:
    return _LINK.sub(r"\1", text)
