"""Sphinx extension: write a reference page for each qcli command from the command itself, before the build."""

from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path

import click
from sphinx.application import Sphinx

from qcli.app import root
from qcli.framework.command import DocumentedCommand, contexts_below, sections


def setup(app: Sphinx) -> dict[str, bool]:
    """Register with Sphinx."""
    app.connect("builder-inited", write_pages)
    return {"parallel_read_safe": True}


def write_pages(app: Sphinx) -> None:
    """Write `reference/commands/*.md`. A page that has not changed is not touched, so that Sphinx need not read it."""
    folder = Path(app.srcdir) / "reference" / "commands"
    folder.mkdir(parents=True, exist_ok=True)
    top = click.Context(root, info_name="qcli")
    names = root.list_commands(top)
    pages = {"index.md": "\n".join(_index(top, names))}
    for name in names:
        command = root.get_command(top, name)
        assert isinstance(command, DocumentedCommand)
        ctx = click.Context(command, info_name=name, parent=top, **command.context_settings)
        pages[f"{name}.md"] = "\n\n".join(part for each in contexts_below(ctx) for part in _command(each))
    for path in folder.glob("*.md"):
        if path.name not in pages:
            path.unlink()
    for name, text in pages.items():
        path = folder / name
        if not path.exists() or path.read_text() != text + "\n":
            path.write_text(text + "\n")


def _index(top: click.Context, names: list[str]) -> Iterator[str]:
    yield "# Commands\n"
    yield "| command | |\n|---|---|"
    for name in names:
        command = root.get_command(top, name)
        assert command is not None
        yield f"| [`qcli {name}`]({name}.md) | {_text(command.get_short_help_str(200))} |"
    yield "\n```{toctree}\n:hidden:\n"
    yield from names
    yield "```"


def _command(ctx: click.Context) -> Iterator[str]:
    command = ctx.command
    assert isinstance(command, DocumentedCommand)
    below = ctx.command_path.count(" ") - 1
    heading = "#" * (below + 1)
    yield f"{heading} {ctx.command_path}"
    usage = " ".join(command.collect_usage_pieces(ctx))
    yield f"```text\n{ctx.command_path} {usage}\n```"
    yield _text(cleandoc(command.help or ""))
    for title, options in sections(ctx, command).items():
        rows = [record for option in options if (record := option.get_help_record(ctx))]
        yield f"**{title}**"
        yield "\n".join(
            ["| option | |", "|---|---|", *(f"| `{_cell(a)}` | {_text(_cell(b))} |" for a, b in rows)]
        )
    for title, text in (command.notes | command.details).items():
        yield f"**{title}.** {_text(text)}"
    if command.examples:
        lines = "\n\n".join(f"# {about}\n{line}" for about, line in command.examples.items())
        yield f"```sh\n{lines}\n```"
    if not isinstance(command, click.Group):
        yield "**Exit status**"
        exits = (f"| {code.value} | {_text(meaning)} |" for code, meaning in command.exits.items())
        yield "\n".join(["| code | |", "|---|---|", *exits])


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _text(text: str) -> str:
    """Escape what Markdown would take for its own: `*`, `_`, `<` and the like in names."""
    return "".join(f"\\{char}" if char in "*_<>`[]#$" else char for char in text)
