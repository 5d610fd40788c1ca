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


LINES: dict[str, list[str]] = {
    **{str(page.relative_to(REPOSITORY)): list(documented_lines(page)) for page in PAGES},
    **{
        ctx.command_path: list(ctx.command.examples.values())
        for ctx in all_contexts()
        if isinstance(ctx.command, DocumentedCommand)
    },
}
"""The lines of each page, and the examples of each command."""


CONTEXTS = "".join(
    f'[context.{name}]\nnsqd_http_address = "127.0.0.1:1"\n' for name in ("local", "prod", "test")
)
"""The contexts of the documentation."""


@pytest.fixture(scope="module")
def contexts_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of configuration with `CONTEXTS`."""
    folder = tmp_path_factory.mktemp("config")
    (folder / "qcli").mkdir()
    (folder / "qcli" / "contexts.toml").write_text(CONTEXTS)
    return folder


def refusals(line: str) -> Iterator[str]:
    """Parse each `qcli` of a line, and yield why it is refused."""
    for words in runs_of_qcli(line):
        command: click.Command = root
        ctx = click.Context(root, info_name="qcli")
        before = [words.pop(0) for _ in range(2)] if words[0] == "--context" else []
        while isinstance(command, click.Group) and words:
            name = words.pop(0)
            found = command.get_command(ctx, name)
            if found is None:
                yield f"there is no command {name}"
                return
            ctx, command = click.Context(found, info_name=name, parent=ctx), found
        try:
            command.make_context(ctx.info_name, [*before, *words], parent=ctx.parent)
        except click.MissingParameter:
            if "xargs" not in line and "$(" not in line:  # these supply the missing arguments
                yield "something is missing"
        except (click.UsageError, Failure) as error:
            # The files need not exist.
            if not re.fullmatch(".*does not exist.*|--config: cannot read.*", error.message):
                yield error.message


@pytest.mark.parametrize("where", [where for where, lines in LINES.items() if lines])
def test_documented_lines_can_be_parsed(
    where: str, contexts_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(contexts_folder))
    refused = {line: found for line in LINES[where] if (found := list(refusals(line)))}
    assert refused == {}
