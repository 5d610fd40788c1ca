"""The documentation's table of legal states is the table the code obeys."""

from pathlib import Path

from trio_nsq.protocol.states import legality_table


def test_document_shows_the_table() -> None:
    document = Path(__file__).parents[2] / "docs" / "protocol.md"
    assert legality_table() in document.read_text()
