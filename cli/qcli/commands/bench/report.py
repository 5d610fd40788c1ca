"""The report of a measurement: text with charts, or JSON. Pure."""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, cast

from trio_nsq.text.wording import count_of

from ...framework.output import rate, size
from ...records.jobs import BenchRecord, BenchSubject, BenchTimes
from ...terminal.figures import sparkline
from .histogram import Histogram
from .measurement import Measurement

if TYPE_CHECKING:
    from rich.console import RenderableType

MAX_WIDTH = 100
_VERBS = {"pub": "Published", "sub": "Consumed", "latency": "Published and received"}


def as_record(about: BenchSubject, measured: Measurement) -> BenchRecord:
    """Return the figures as a JSON object, after the fields of `about`."""
    messages = measured.messages
    return {
        **about,
        "interrupted": measured.interrupted,
        "messages": messages,
        "bytes": measured.body_bytes,
        "seconds": round(measured.seconds, 6),
        "messages_per_second": round(measured.per_second(messages), 1),
        "bytes_per_second": round(measured.per_second(measured.body_bytes), 1),
        "messages_by_second": list(measured.by_second),
        "connections": [
            {
                "broker": tally.address,
                "messages": tally.messages,
                "messages_per_second": round(measured.per_second(tally.messages), 1),
            }
            for tally in measured.tallies
        ],
        "connection_rates": measured.connection_rates(),
        "missing": measured.missing,
        "finished_afterwards": measured.afterwards,
        "client_cpu_seconds": round(measured.cpu_s, 3),
        "times": {name.replace(" ", "_"): _as_record(times) for name, times in measured.times.items()},
    }


def _as_record(times: Histogram) -> BenchTimes:
    classes = [
        {"up_to_ms": limit if limit < math.inf else None, "count": count} for limit, count in times.coarse()
    ]
    figures = {f"{name}_ms": value for name, value in times.figures_ms().items()}
    mean_ms = round(1000 * times.mean_s, 4)
    # The type names the percentiles, which mypy cannot know of the dict.
    return cast(BenchTimes, {"count": times.count, "mean_ms": mean_ms, **figures, "histogram": classes})


def as_text(kind: str, place: str, measured: Measurement, width: int) -> str:
    """Return the report for people.

    Args:
        kind: `pub`, `sub` or `latency`.
        place: The topic and the brokers.
        width: The columns of the terminal.
    """
    from rich.console import Console, Group

    width = min(width, MAX_WIDTH)
    much = f"{count_of(measured.messages, 'message')}, {size(measured.body_bytes)}"
    head = f"{_VERBS[kind]} {much}, in {measured.seconds:.2f} s"
    parts: list[RenderableType] = [head, place, "", _grid(_facts(kind, measured, width))]
    times = {name: found for name, found in measured.times.items() if found.count}
    if times:
        rows = [(name, *map(_ms, found.figures_ms().values())) for name, found in times.items()]
        parts += ["", _grid([("", *next(iter(times.values())).figures_ms()), *rows], numbers=True)]
        name, found = next(iter(times.items()))
        parts += ["", f"Times: {name}", _bars(found)]
    file = io.StringIO()
    console = Console(file=file, width=width, color_system=None, highlight=False, markup=False, emoji=False)
    console.print(Group(*parts))
    return "".join(f"{line.rstrip()}\n" for line in file.getvalue().splitlines())


def _facts(kind: str, measured: Measurement, width: int) -> list[tuple[str, str]]:
    speed, bytes_per_s = measured.per_second(measured.messages), measured.per_second(measured.body_bytes)
    facts = [("throughput", f"{rate(speed)} messages/s, {size(bytes_per_s)}/s")]
    if len(measured.tallies) > 1:
        figures = measured.connection_rates().items()
        shown = "  ".join(f"{name} {rate(figure)}" for name, figure in figures)
        facts.append((f"{len(measured.tallies)} connections", shown))
    if len(measured.by_second) > 1:
        low, high = (rate(most(measured.by_second)) for most in (min, max))
        facts.append(("each second", f"{_trend(measured.by_second, width // 3)}  {low} to {high} messages/s"))
    if measured.afterwards:
        facts.append(
            ("afterwards", f"{count_of(measured.afterwards, 'message')} on the way; not counted above")
        )
    if measured.missing:
        missing = "arrived too late to be finished" if kind == "sub" else "did not arrive"
        facts.append(("missing", f"{count_of(measured.missing, 'message')} {missing}"))
    if measured.seconds > 0:
        facts.append(("this client", f"used {measured.cpu_s / measured.seconds:.0%} of a processor"))
    return facts


def _trend(values: Sequence[float], width: int) -> str:
    """Return bars for values; if there are more than `width`, each bar is a mean of several."""
    step = math.ceil(len(values) / width)
    means = [statistics.fmean(values[start : start + step]) for start in range(0, len(values), step)]
    return sparkline(means, len(means))


def _grid(rows: Iterable[Sequence[str]], *, numbers: bool = False) -> RenderableType:
    """Return rows as a table; columns of numbers are aligned to the right, except the first one."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for place, row in enumerate(rows):
        if not place:
            for column in range(len(row)):
                table.add_column(justify="right" if numbers and column else "left")
        table.add_row(*row)
    return table


def _bars(times: Histogram) -> RenderableType:
    from rich.bar import Bar
    from rich.table import Table

    table = Table.grid(padding=(0, 1), expand=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(ratio=1)
    table.add_column(justify="right", no_wrap=True)
    classes = times.coarse()
    most, last = max(count for _, count in classes), 0.0
    for limit, count in classes:
        label = f"up to {_ms(limit)}" if limit < math.inf else f"over {_ms(last)}"
        table.add_row(label, Bar(most, 0, count), f"{count / times.count:.1%}")
        last = limit
    return table


def _ms(value: float) -> str:
    """Format milliseconds with three digits."""
    return f"{value / 1000:.3g} s" if value >= 1000 else f"{value:.3g} ms"
