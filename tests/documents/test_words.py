"""Check that replaced terms and unclear phrases do not return."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUFFIXES = {".py", ".md", ".1", ".yaml", ".yml", ".toml"}
EXCLUDED = {"CHANGELOG.md"}
RETIRED = {
    r"\bdistribution point\b": "high watermark",
    r"\b(?:is_)?hungry\b": "has_ready_consumer",
    r"\bstopped_short\b": "budget_exhausted",
    r"\bburied\b": "moved to the dead-letter topic",
    r"\bGatheredBatch\b": "CombinedBatch",
    r"\bOutbox\b": "SendBuffer",
    r"\bOncePublisher\b": "IdempotentProducer",
    r"\b(CommitThreads|GroupCommitter)\b": "LocalSync",
    r"\bSetAside\b": "WithdrawnMessage",
    r"\bSpareRoom\b": "DiskReserve",
    r"\bAlarms\b": "DeadlineHeap",
    r"\bbegin_file\b": "rotate",
    r"\bunlogged\b": "pending_wal",
    r"\bread_soon\b": "prefetch",
    r"\btalk to standard error\b": "diagnostics go to stderr",
    r"\bgoes easy\b": "backs off",
    r"\btaken to pieces\b": "parsed",
    r"\bmistakes? of ours\b": "a bug in the broker",
    r"\b[Ww]hoever\b": "the actor: the client, the producer, the caller",
    r"\b[Nn]obody (?:notices|is told|has|knows)\b": "the actor",
    r"\bhas got\b": "has",
}


def is_generated(path: Path) -> bool:
    """Whether `make docs` writes this file, or `bench/quick.py`, which copies versions of the sources."""
    folders = ("docs/_build", "docs/reference/commands", "bench/.builds")
    return any(path.is_relative_to(ROOT / folder) for folder in folders)


def texts() -> Iterator[Path]:
    """Yield sources, documents and manual pages of the project."""
    for folder in ("core", "cli", "docs", "man", "bench", "examples", "deploy"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in SUFFIXES and path.name not in EXCLUDED and not is_generated(path):
                yield path
    yield from (path for path in sorted(ROOT.glob("*.md")) if path.name not in EXCLUDED)


@cache
def contents() -> dict[str, str]:
    """Return all texts, by their paths in the project."""
    return {str(path.relative_to(ROOT)): path.read_text() for path in texts()}


@pytest.mark.parametrize("pattern", RETIRED)
def test_retired_phrase_is_not_used(pattern: str) -> None:
    # Without `\b` at its start, most patterns begin with letters, which are found much faster.
    roughly, exactly = re.compile(pattern.removeprefix(r"\b")), re.compile(pattern)
    found = [
        f"{path}:{number}: {line.strip()}"
        for path, text in contents().items()
        if roughly.search(text)
        for number, line in enumerate(text.splitlines(), 1)
        if exactly.search(line)
    ]
    assert found == [], f"say: {RETIRED[pattern]}"
