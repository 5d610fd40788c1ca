"""Check that qcli can parse the command lines in the documentation and in the commands' examples."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from cli.support import all_contexts
from qcli.app import root
from qcli.framework.command import DocumentedCommand
from qcli.framework.errors import Failure

REPOSITORY = Path(__file__).parents[2]
PAGES = [
    REPOSITORY / "README.md",
    *sorted(path for path in (REPOSITORY / "docs").rglob("*.md") if "commands" not in path.parts),
]
_OPERATORS = {"|", ">", ">>", "<", "&", "&&", "||", ";"}


def documented_lines(page: Path) -> Iterator[str]:
    """Return the lines of a page's shell blocks that run qcli, with continued lines joined."""
    for kind, block in re.findall(
        r"^```(sh|console)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE
    ):
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            is_command = kind == "sh" or line.startswith("$ ")
            if is_command and re.search(r"\bqcli [a-z]", line) and not re.search(r"\$[A-Z]", line):
                yield re.sub(r" \d?>>? ?\S+", "", line.removeprefix("$ ")).strip()


def runs_of_qcli(line: str) -> Iterator[list[str]]:
    """Return the arguments of each `qcli` in a shell line."""
    words: list[str] | None = None
    for word in [
        *shlex.split(line.replace("$(", "; ").replace(")", " ;").replace("; ", " ; "), comments=True),
        ";",
    ]:
        if word in _OPERATORS:
            if words is not None:
                yield words
            words = None
        elif word == "qcli" and words is None:
            words = []
        elif words is not None:
            words.append(word)


LINES = [
    pytest.param(line, id=f"{where} {line}")
    for where, lines in [
        *((page.name, documented_lines(page)) for page in PAGES),
        *(
            (ctx.command_path, ctx.command.examples.values())
            for ctx in all_contexts()
            if isinstance(ctx.command, DocumentedCommand)
        ),
    ]
    for line in lines
]


CONTEXTS = "".join(
    f'[context.{name}]\nnsqd_http_address = "127.0.0.1:1"\n' for name in ("local", "prod", "test")
)
"""The contexts of the documentation."""


@pytest.mark.parametrize("line", LINES)
def test_documented_line_can_be_parsed(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "qcli").mkdir()
    (tmp_path / "qcli" / "contexts.toml").write_text(CONTEXTS)
    for words in runs_of_qcli(line):
        command: click.Command = root
        ctx = click.Context(root, info_name="qcli")
        before = [words.pop(0) for _ in range(2)] if words[0] == "--context" else []
        while isinstance(command, click.Group) and words:
            name = words.pop(0)
            found = command.get_command(ctx, name)
            assert found is not None, name
            ctx, command = click.Context(found, info_name=name, parent=ctx), found
        said = ""
        try:
            command.make_context(ctx.info_name, [*before, *words], parent=ctx.parent)
        except click.MissingParameter:
            said = (
                "" if "xargs" in line or "$(" in line else "something is missing"
            )  # these supply the missing arguments
        except (click.UsageError, Failure) as error:
            said = error.message
        assert re.fullmatch("|.*does not exist.*|--config: cannot read.*", said), (
            said
        )  # the files need not exist
