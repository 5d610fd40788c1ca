"""The status of `to-nsq`: lines on standard error, JSON on standard output, or live on a terminal."""

from __future__ import annotations

import shutil
import time
from typing import TYPE_CHECKING

import trio

from trio_nsq.text.wording import count_of, printable

from ...framework.output import json_lines, no_color, print_diagnostic, rate, size, with_counts, write
from ...records.jobs import CopyRecord
from ...terminal.progress import RecentRate, show_live_text

if TYPE_CHECKING:
    from rich.text import Text

    from trio_nsq.connectors.to_nsq.progress import Progress, SourceProgress

_POLL_S = 0.2
_NS_PER_S = 1_000_000_000
_Key = tuple[str, str]


class Status:
    """The status of each source, with the rate since the status before."""

    def __init__(self, progress: Progress, now_s: float) -> None:
        self.progress = progress
        self._before: dict[_Key, int] = {}
        self._before_s = now_s

    def write(self, form: str) -> None:
        now_s = trio.current_time()
        elapsed_s, self._before_s = now_s - self._before_s, now_s
        before, self._before = self._before, {key: each.copied for key, each in self.progress.sources.items()}
        records = []
        for key, each in self.progress.sources.items():
            copied = each.copied - before.get(key, 0)
            records.append(_record(each, copied / elapsed_s if elapsed_s > 0 else 0.0))
        if form == "json":
            write(json_lines(records))
            return
        for (topic, broker), record in zip(self.progress.sources, records, strict=True):
            lag = record["lag"]
            print_diagnostic(
                f"{topic} from {broker or 'all brokers'}: {count_of(record['copied'], 'message')} copied, "
                f"{rate(record['per_second'])} messages/s"
                + (f", {record['dropped']:,} left out" if record["dropped"] else "")
                + (f", {record['not_json']:,} not JSON" if record["not_json"] else "")
                + (f", lag {lag:,}" if lag is not None else "")
            )


def _record(each: SourceProgress, per_second: float) -> CopyRecord:
    return {
        "time_ns": time.time_ns(),
        "topic": each.topic,
        "broker": each.broker,
        "copied": each.copied,
        "copied_bytes": each.copied_bytes,
        "dropped": each.dropped,
        "not_json": each.not_json,
        "per_second": round(per_second, 1),
        "lag": each.lag,
        "exactly_once": each.exactly_once,
    }


async def write_status(status: Status, form: str, interval_s: float, every: int = 0) -> None:
    """Write the status at an interval, or after so many messages, until cancelled."""
    if every:
        written = 0
        while True:
            await trio.sleep(_POLL_S)
            copied = status.progress.sums.copied
            if copied - written >= every:
                written = copied
                status.write(form)
    while interval_s:
        await trio.sleep(interval_s)
        status.write(form)


def summary(progress: Progress) -> str:
    sums = progress.sums
    text = f"Copied {count_of(sums.copied, 'message')} ({size(sums.copied_bytes)})"
    return with_counts(text, (sums.dropped, "{} left out"), (sums.not_json, "{} not JSON")) + "."


async def show_live(progress: Progress) -> None:
    """Show a line per source on standard error until cancelled; then remove them."""
    rates: dict[_Key, RecentRate] = {}
    await show_live_text(lambda now_s: _lines(progress, rates, now_s))


def _lines(progress: Progress, rates: dict[_Key, RecentRate], now_s: float) -> Text:
    from rich.text import Text

    room = max(1, shutil.get_terminal_size().lines - 2)
    bold = "" if no_color() else "bold"
    lines = []
    for key in rates.keys() - progress.sources.keys():
        del rates[key]
    for key, each in progress.sources.items():
        per_second = rates.setdefault(key, RecentRate()).after(now_s, each.copied)
        lag = each.lag
        lines.append(
            Text.assemble(
                (printable(each.topic), bold),
                f" from {printable(each.broker) or 'all brokers'}: ",
                (f"{each.copied:,}", bold),
                " copied",
                f", {rate(per_second)}/s" if per_second is not None else "",
                f", {each.dropped:,} left out" if each.dropped else "",
                f", {each.not_json:,} not JSON" if each.not_json else "",
                f", lag {lag:,}" if lag is not None else "",
                no_wrap=True,
                overflow="ellipsis",
            )
        )
    if len(lines) > room:
        lines[room - 1 :] = [Text(f"and {len(lines) - room + 1} more topics and brokers")]
    return Text("\n").join(lines)
