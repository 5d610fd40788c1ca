"""Moves a channel on several brokers, or says what the move would do."""

from dataclasses import dataclass
from datetime import UTC, datetime

from ...api.answers import Seek
from ...text.durations import duration_text, parse_long_duration_ms

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


def done_text(move: Seek) -> str:
    """Return what a move did, for people."""
    text = f"moved from sequence {move['from_sequence']:,} to {move['to_sequence']:,}: "
    text += f"{move['delivered_again']:,} delivered again, {move['skipped']:,} skipped"
    return text + (f", {move['in_flight']:,} in flight cannot be finished" if move["in_flight"] else "")


def limit_text(move: Seek) -> str:
    """Return why a move does not reach the wanted position; empty if it does."""
    if move["limited_by"] == "earliest":
        return "older messages are no longer kept"
    return "the paused topic has passed on no more" if move["limited_by"] == "latest" else ""
