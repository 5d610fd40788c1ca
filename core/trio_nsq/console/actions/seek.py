"""Moves a channel on several brokers, or says what the move would do."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ...durations import duration_text, parse_long_duration_ms
from ..fleet.stats import number
from ..upstream.client import Results, Upstream, UpstreamError

_MAX_DIGITS = 18


@dataclass(frozen=True, slots=True)
class Destination:
    """A position.

    Attributes:
        http: For the broker.
        qcli: For the command line.
        text: For people.
        is_sequence: Each broker has its own sequences, so it is for one broker only.
    """

    http: str
    qcli: str
    text: str
    is_sequence: bool = False


def destination(kind: str, value: str) -> Destination:
    """Return the position of a form: a kind and its text. Raises ValueError: the text is for people."""
    value = value.strip()
    if kind == "earliest":
        return Destination("earliest", "earliest", "the oldest message that is kept")
    if kind == "latest":
        return Destination("latest", "latest", "the end of the topic")
    if kind == "ago":
        ago_ms = parse_long_duration_ms(value.removeprefix("-"))
        ago = duration_text(ago_ms)
        return Destination(f"-{ago_ms}ms", ago, f"the messages of the last {ago}")
    if kind == "time":
        moment = _moment(value)
        text = moment.strftime("%Y-%m-%dT%H:%M:%S") + (f".{moment:%f}" if moment.microsecond else "") + "Z"
        return Destination(f"@{text}", text, f"the first message from {text} on")
    if kind == "sequence":
        if not (value.isascii() and value.isdigit() and len(value) <= _MAX_DIGITS):
            raise ValueError(f"{value!r} is not a sequence such as 1000")
        return Destination(str(int(value)), str(int(value)), f"sequence {int(value):,}", is_sequence=True)
    raise ValueError("choose where to: the oldest message, the end, a time or a sequence")


def _moment(text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
        moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except (ValueError, OverflowError):
        raise ValueError(f"{text!r} is not a time such as 2026-11-23T14:05, in UTC") from None
    if moment.year < 1970:
        raise ValueError(f"{text!r} is before 1970")
    return moment


@dataclass(frozen=True, slots=True)
class Move:
    """The move of a channel on one broker, done or only planned; see the broker's `/channel/seek`."""

    from_sequence: int
    to_sequence: int
    delivered_again: int
    skipped: int
    in_flight: int
    limited_by: str

    @property
    def text(self) -> str:
        """What was done, for people."""
        text = f"moved from sequence {self.from_sequence:,} to {self.to_sequence:,}: "
        text += f"{self.delivered_again:,} delivered again, {self.skipped:,} skipped"
        return text + (f", {self.in_flight:,} in flight cannot be finished" if self.in_flight else "")

    @property
    def limit_text(self) -> str:
        """Why it does not reach the wanted position; empty if it does."""
        if self.limited_by == "earliest":
            return "older messages are no longer kept"
        return "the paused topic has passed on no more" if self.limited_by == "latest" else ""


async def seek(
    upstream: Upstream,
    addresses: Sequence[str],
    token: str | None,
    topic: str,
    channel: str,
    to: Destination,
    *,
    dry_run: bool,
) -> Results[Move]:
    """Move a channel on all these brokers; with `dry_run`, change nothing."""
    params = {"topic": topic, "channel": channel, "to": to.http} | ({"dry_run": "true"} if dry_run else {})

    async def ask(address: str) -> Move:
        answer = await upstream.json("POST", address, "/channel/seek", params, token=token)
        return _move(address, answer)

    return await upstream.on_all(addresses, ask)


def _move(address: str, answer: Any) -> Move:
    if not isinstance(answer, dict) or type(answer.get("skipped")) is not int:
        raise UpstreamError(address, "its answer is not that of a move")
    return Move(
        number(answer, "from_sequence"),
        number(answer, "to_sequence"),
        number(answer, "delivered_again"),
        number(answer, "skipped"),
        number(answer, "in_flight"),
        str(answer.get("limited_by") or "")[:20],
    )
