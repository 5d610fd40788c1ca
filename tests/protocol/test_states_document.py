"""Check that the documented table of legal states equals the code."""

from pathlib import Path

from trio_nsq.protocol.states import LEGAL_STATES, State


def test_document_shows_the_table() -> None:
    rows = [
        ["command", *(f"{state.name.lower()} ({state:d})" for state in State)],
        ["---"] * (1 + len(State)),
        *(
            [verb.decode(), *("yes" if state in legal else "" for state in State)]
            for verb, legal in LEGAL_STATES.items()
        ),
    ]
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    document = Path(__file__).parents[2] / "docs" / "reference" / "wire-protocol.md"
    assert table in document.read_text()
