"""Tests for the lines of the live screen of `qcli stat`, at every size, without a terminal."""

import re
from typing import Any

import pytest

from qcli.commands.stat.columns import COUNTS
from qcli.commands.stat.drawing import Drawing, History, Picture
from qcli.commands.stat.rows import Report, Row, Sampler, combine
from qcli.commands.stat.selection import Selection
from qcli.commands.stat.settings import Settings


def channel(name: str, depth: int) -> dict[str, Any]:
    counts = {column.key: 0 for column in COUNTS} | {"depth": depth, "message_count": depth}
    return {"channel_name": name, "paused": depth == 1, "oldest_message_age_ms": depth * 1000} | counts


def topic(number: int, depth: int) -> dict[str, Any]:
    counts = {"depth": 0, "backend_depth": 0, "message_count": depth, "paused": False}
    channels = [channel("archive", depth), channel("a-channel-with-a-very-long-name", 0)]
    return {"topic_name": f"topic.{number:02}.created", "channels": channels} | counts


def picture(topics: int, history: History | None = None) -> Picture:
    """Return the second report of two brokers, which have the same topics."""
    history = history or History()
    samplers = {f"127.0.0.1:415{number}": Sampler() for number in (1, 3)}
    report = Report()
    for second in (1, 2):
        rows = {
            broker: sampler.rows([topic(number, number * second) for number in range(topics)], float(second))
            for broker, sampler in samplers.items()
        }
        report = combine(rows)
        history.add([*report.sums, *(row for parts in report.parts.values() for row in parts)])
    return Picture(
        "2 brokers  12:00:00", report, history, ["no answer from 127.0.0.1:4155: not in these numbers"]
    )


def plain(line: str) -> str:
    return re.sub(r"\x1b\[\d+m", "", line)


def test_hints_are_whole_at_every_width() -> None:
    shown, drawing = picture(1), Drawing(Settings(Selection()), unicode=True)
    every = plain(drawing.lines(shown, 200, 24)[-1]).strip().split("  ")
    assert len(every) > 5
    for width in range(6, 100):
        hints = plain(drawing.lines(shown, width, 24)[-1]).strip().split("  ")
        assert hints == every[: len(hints)], width


@pytest.mark.parametrize("keys", ["", "?", "/topic.1", "end", "b", "down enter", "/nothing"])
@pytest.mark.parametrize("topics", [0, 1, 40])
def test_lines_fit_every_size(topics: int, keys: str) -> None:
    shown = picture(topics)
    settings = Settings(Selection())
    drawing = Drawing(settings, unicode=True)
    drawing.lines(shown, 80, 24)
    for key in list(keys) if keys.startswith("/") else keys.split():
        settings.press(key)
    for width in (*range(1, 30, 3), 40, 80, 140, 300):
        for height in (*range(1, 6), 8, 9, 10, 12, 24, 60):
            lines = drawing.lines(shown, width, height)
            assert len(lines) <= height
            assert max(len(plain(line)) for line in lines) <= width
            assert len(drawing.farewell(shown, width, height)) <= height


@pytest.mark.parametrize("topics", [0, 40])
def test_nothing_has_no_total(topics: int) -> None:
    lines = Drawing(Settings(Selection()), unicode=True).lines(picture(topics), 80, 24)
    assert len(lines) == 24
    assert sum(plain(line).startswith("total") for line in lines) == (2 if topics else 0)
    assert plain(lines[-1]).startswith("q quit")


def rows_shown(lines: list[str]) -> list[str]:
    """Return the lines between the headings and the total."""
    texts = [plain(line) for line in lines]
    start = next(number for number, text in enumerate(texts) if text.startswith("topic/channel"))
    end = next(number for number, text in enumerate(texts) if text.startswith("total "))
    return texts[start + 1 : end]


def test_cursor_stays_on_its_row_when_rows_come_and_go() -> None:
    settings = Settings(Selection())
    drawing = Drawing(settings, unicode=True)
    drawing.lines(picture(40), 80, 24)
    for _ in range(5):
        settings.press("down")

    def cursor(topics: int) -> Row | None:
        drawing.lines(picture(topics), 80, 24)
        return settings.place.row

    first = cursor(40)
    assert first is not None
    assert first.name == "topic.01.created/a-channel-with-a-very-long-name"
    settings.press("s")  # the order changes: back to the top
    assert cursor(40) is None
    settings.press("down")
    at_top = cursor(40)
    assert at_top is not None
    assert at_top.name == "topic.39.created"
    fewer = cursor(30)  # topic.39 is gone: the row that is now there
    assert fewer is not None
    assert fewer.name == "topic.29.created"
    assert cursor(0) is None


def test_moving_does_not_scroll_past_the_ends() -> None:
    settings = Settings(Selection())
    drawing = Drawing(settings, unicode=True)
    shown = picture(40)
    seen = set[str]()
    first = rows_shown(drawing.lines(shown, 80, 24))
    for _ in range(200):
        settings.press("down")
        rows = rows_shown(drawing.lines(shown, 80, 24))
        assert len(rows) == len(first)
        seen.update(rows)
    assert len({row.split()[0] for row in seen if row.startswith("topic.")}) == 40
    for _ in range(20):
        settings.press("page-up")
    assert rows_shown(drawing.lines(shown, 80, 24)) == first


def test_history_forgets_what_is_gone_and_sums_what_is_there() -> None:
    history = History()
    shown = picture(2, history)
    assert history.total(shown.report.sums)["ingress_rate"] == [None, 2.0]
    gone = shown.report.sums
    history.add([])
    assert history.of(gone[0]) == {}
    assert history.total(gone)["ingress_rate"] == []
