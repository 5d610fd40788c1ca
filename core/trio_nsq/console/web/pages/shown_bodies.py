"""How pages show the bodies of a topic to a viewer."""

from functools import cache, partial

from starlette.requests import Request

from ....access.policy import Role
from ....bodies.reading import BodyReader
from ....fleet.dead_letters import CHANNEL
from ....fleet.stats import text
from ...access.viewer import Forbidden, require, viewer_of
from ...console import console_of, snapshot_of
from ...messages.bodies import TopicBodies
from ...messages.message import Message
from ...messages.paging import KEEP_BYTES

UNMASK: Role = "unmask"
"""The role that sees masked fields, after a click that the audit log records."""


def shown_bodies(
    request: Request,
    topic: str,
    keep_bytes: int = KEEP_BYTES,
    *,
    masks: bool = True,
    as_published: bool = False,
) -> TopicBodies:
    """Return how a page shows the bodies of a topic, see `TopicBodies`."""
    readers = console_of(request).bodies.readers
    may_have_letters = cache(partial(_may_have_letters, request))
    return TopicBodies(
        readers, topic, keep_bytes, masks=masks, as_published=as_published, may_have_letters=may_have_letters
    )


def channel_reader(request: Request, topic: str) -> BodyReader:
    """Return what reads the bodies of a channel's messages, of which brokers do not say the origin.

    In a dead-letter topic they may come from any topic: the fields of all are masked.
    """
    readers = console_of(request).bodies.readers
    has_letters = readers.have_masks and _may_have_letters(request, topic)
    return readers.of_unknown_origin(topic) if has_letters else readers.of(topic)


def _may_have_letters(request: Request, topic: str) -> bool:
    """Whether a topic has dead letters of other topics, or may have had them."""
    topics = snapshot_of(request).topics
    state = topics.get(topic)
    if state is None or CHANNEL in state.channels:
        return True  # of a topic that does not exist any more, it is not known
    return any(
        text(queue.raw, "dead_letter_topic") == topic
        for each in topics.values()
        for channel in each.channels.values()
        for queue in channel.parts.values()
    )


def may_unmask(request: Request, topic: str, message: Message) -> bool:
    """Whether the viewer may see the masked fields of a message: also those of the topics that it may come from."""
    viewer = viewer_of(request)
    return viewer.allows(UNMASK, topic) and viewer.allows(UNMASK, _origin(request, topic, message))


def _origin(request: Request, topic: str, message: Message) -> str:
    """Return the topic that a message comes from; empty: it may be any."""
    if message.origin is None:
        return topic
    origin = message.origin["topic"]
    return "" if _may_have_letters(request, origin) else origin


def require_unmask(request: Request, topic: str, message: Message) -> None:
    """Raises Forbidden: the viewer may not see the masked fields of a message."""
    require(request, UNMASK, topic)
    if not may_unmask(request, topic, message):
        origin = _origin(request, topic, message)
        where = f"topic {origin}" if origin else "all topics"
        raise Forbidden(f"This needs the role {UNMASK} on {where}, too.")
