"""Options in the way of Go's flag package: one dash or two, also for names of one letter."""

import click
import pytest

from qcli.framework.go_flags import GoFlagsCommand
from qcli.framework.options import option


@click.command("load", cls=GoFlagsCommand)
@option("Options", "--concurrency", "-n", type=int, default=100, help="Load at most this many at once.")
@option("Options", "--topic", help="Load this topic.")
@option("Options", "--quiet", "-q", is_flag=True, help="Print errors only.")
@click.argument("words", nargs=-1)
def load(**values: object) -> dict[str, object]:
    """Load a topic."""
    return values


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("-n 1", {"concurrency": 1}),
        ("-n=1", {"concurrency": 1}),
        ("--n=1", {"concurrency": 1}),
        ("--n 1", {"concurrency": 1}),
        ("-n -1", {"concurrency": -1}),
        ("-concurrency=1", {"concurrency": 1}),
        ("--quiet -topic=t", {"quiet": True, "topic": "t"}),
        ("-quiet -topic t word", {"quiet": True, "topic": "t", "words": ("word",)}),
        ("-q -n=2 word", {"quiet": True, "concurrency": 2, "words": ("word",)}),
        ("-topic=", {"topic": ""}),
    ],
)
def test_syntax(line: str, expected: dict[str, object]) -> None:
    found = load.main(line.split(), standalone_mode=False)
    assert found == {"concurrency": 100, "topic": None, "quiet": False, "words": ()} | expected
