"""Tables that fit the width of a terminal."""

import pytest

from qcli.terminal.figures import short_size
from qcli.terminal.fitted_table import Column, fitted_table

Row = tuple[str, str, str, str]

COLUMNS: list[Column[Row]] = [
    Column("broker", lambda row: row[0], is_name=True),
    Column("messages", lambda row: row[1], short="msgs"),
    Column("version", lambda row: row[2], rank=1),
    Column("used", lambda row: row[3], rank=2),
]
ROWS = [("broker-one.example.com:4151", "12", "0.1.0", "18G"), ("b\x1b:1", "7", "1.3.0", "")]


@pytest.fixture(autouse=True)
def utf8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "C.UTF-8")


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (
            None,
            [
                "broker                       messages  version  used",
                "broker-one.example.com:4151        12    0.1.0   18G",
                "b\\x1b:1                             7    1.3.0",
            ],
        ),
        (
            51,
            [
                "broker                       msgs  version  used",
                "broker-one.example.com:4151    12    0.1.0   18G",
                "b\\x1b:1                         7    1.3.0",
            ],
        ),
        (
            47,
            [
                "broker                       msgs  version",
                "broker-one.example.com:4151    12    0.1.0",
                "b\\x1b:1                         7    1.3.0",
            ],
        ),
        (
            33,
            [
                "broker                       msgs",
                "broker-one.example.com:4151    12",
                "b\\x1b:1                         7",
            ],
        ),
        (20, ["broker          msgs", "broker-…m:4151    12", "b\\x1b:1            7"]),
        (5, ["broker    msgs", "brok…151    12", "b\\x1b:1      7"]),
    ],
)
def test_table_fits(width: int | None, lines: list[str]) -> None:
    assert fitted_table(COLUMNS, ROWS, width).splitlines() == lines
    assert width is None or width == 5 or max(map(len, lines)) <= width


def test_columns_without_text_are_left_out() -> None:
    rows = [("b", "1", "", "")]
    assert fitted_table(COLUMNS, rows, None) == "broker  messages\nb              1\n"


def test_names_are_cut_in_ascii_without_utf8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "C")
    assert "broker-~m:4151" in fitted_table(COLUMNS, ROWS, 20)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0B"), (999, "999B"), (1000, "0.9K"), (1024, "1.0K"), (10 * 1024, "10K"), (1536 * 1024, "1.5M"),
     (53 * 1024**3, "53G"), (999 * 1024**4, "999T"), (5 * 1024**5, "5.0P"), (1024**7, "many")],
)  # fmt: skip
def test_short_size(count: int, text: str) -> None:
    assert short_size(count) == text
