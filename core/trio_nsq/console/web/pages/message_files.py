"""Messages of lists as files: CSV or JSON, with the filter of the page and the bodies as it shows them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.requests import Request

from ....api.request import Request as BrokerRequest
from ....bodies.reading import ReadBody
from ....fleet.dead_letters import CHANNEL
from ...console import upstream_of
from ...messages.bodies import WHOLE
from ...messages.list_download import COLUMNS, LINE_COLUMNS, download_lines, download_list
from ...messages.message import Message
from ...messages.paging import Start
from ...messages.search import Matches
from ...record_files import RecordWriter, file_headers
from ...upstream.client import UpstreamError
from ..page import NotFound
from ..streamed import Streamed
from .message_brokers import TopicBrokers
from .shown_bodies import channel_reader, may_unmask, shown_bodies

Lines = Callable[[int], BrokerRequest[list[dict[str, Any]]]]
"""Asks a broker for messages from a sequence on."""


async def file_of_messages(
    request: Request,
    topic: str,
    brokers: TopicBrokers,
    start: Start,
    matches: Matches | None,
    form: str,
    *,
    unmasks: bool = False,
) -> Streamed:
    """Return the messages of a topic from a place on, those that match, as a file.

    Args:
        unmasks: Without masks, where the viewer may see the fields.

    Raises:
        UpstreamError: A broker does not answer.
        NotFound: No broker has such a list.
    """
    _require_broker(brokers.asked, brokers.missing, f"topic {topic}")
    masked = shown_bodies(request, topic, WHOLE).without_limit()
    unmasked = shown_bodies(request, topic, WHOLE, masks=False).without_limit()

    may_see: dict[str | None, bool] = {}  # by the topic of origin: it takes a look at all topics

    def read(message: Message) -> ReadBody:
        origin = None if message.origin is None else message.origin["topic"]
        if unmasks and origin not in may_see:
            may_see[origin] = may_unmask(request, topic, message)
        return (unmasked if may_see.get(origin) else masked).read(message.body, origin or "")

    pieces = download_list(
        upstream_of(request),
        shown_bodies(request, topic, WHOLE, as_published=True),
        brokers.asked,
        start,
        matches,
        read,
        RecordWriter(form, COLUMNS),
        missing=brokers.missing,
    )
    await anext(pieces)  # the brokers answer
    return Streamed(pieces, file_headers(topic, form))


async def file_of_channel(
    request: Request,
    topic: str,
    channel: str,
    brokers: Sequence[str],
    lines: Lines,
    form: str,
    missing: Mapping[str, str],
    *,
    name: str = "messages",
) -> Streamed:
    """Return messages of a channel as a file.

    Args:
        lines: The list; its first answer has all that the broker shows.
        missing: Why brokers do not answer.
        name: What the list is, for the name of the file.

    Raises:
        UpstreamError: The first broker does not answer.
        NotFound: No broker has such a list.
    """
    _require_broker(brokers, missing, f"channel {topic}/{channel}")
    reader = channel_reader(request, topic)
    pieces = download_lines(
        upstream_of(request),
        brokers,
        lines,
        {"topic": topic, "channel": channel},
        lambda body, _: reader.read(body),
        RecordWriter(form, LINE_COLUMNS),
        has_more=False,
        missing=missing,
    )
    await anext(pieces)
    return Streamed(pieces, file_headers(f"{topic}-{channel}-{name}", form))


async def file_of_dead_letters(
    request: Request, topic: str, brokers: Sequence[str], lines: Lines, form: str, missing: Mapping[str, str]
) -> Streamed:
    """Return dead letters of a topic as a file. The arguments are those of `file_of_channel`; it asks for all."""
    _require_broker(brokers, missing, f"channel {topic}/{CHANNEL}")
    shown = shown_bodies(request, topic, WHOLE).without_limit()

    def read(body: bytes, line: Mapping[str, Any]) -> ReadBody:
        origin = line.get("origin")
        return shown.read(body, (origin or {}).get("topic") or "")

    pieces = download_lines(
        upstream_of(request),
        brokers,
        lines,
        {"topic": topic},
        read,
        RecordWriter(form, LINE_COLUMNS),
        has_more=True,
        missing=missing,
    )
    await anext(pieces)
    return Streamed(pieces, file_headers(f"{topic}-dead-letters", form))


def _require_broker(brokers: Sequence[str], missing: Mapping[str, str], what: str) -> None:
    """Check that a broker has a list: a script would take an empty file for an empty list.

    Args:
        brokers: Those that are asked.
        missing: Why others are not.

    Raises:
        UpstreamError: None is asked, and this one may have it.
        NotFound: None has it.
    """
    if brokers:
        return
    for address, why in missing.items():
        raise UpstreamError(address, why)
    raise NotFound(f"No broker that can list messages has {what}: an nsqd cannot.")
