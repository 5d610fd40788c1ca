"""How pages show the bodies of a topic to a viewer."""

from starlette.requests import Request

from ....access.policy import Role
from ....bodies.reading import BodyReader
from ....fleet.dead_letters import CHANNEL
from ...access.viewer import Forbidden, Viewer, require
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
    return TopicBodies(readers, topic, keep_bytes, masks=masks, as_published=as_published)


def channel_reader(request: Request, topic: str) -> BodyReader:
    """Return what reads the bodies of a channel's messages, of which brokers do not say the origin.

    In a dead-letter topic they may come from any topic: the fields of all are masked.
    """
    readers, state = console_of(request).bodies.readers, snapshot_of(request).topics.get(topic)
    has_letters = state is not None and CHANNEL in state.channels
    return readers.of_unknown_origin(topic) if has_letters else readers.of(topic)


def may_unmask(viewer: Viewer, topic: str, message: Message) -> bool:
    """Whether a viewer may see the masked fields of a message: also those of the topic that it comes from."""
    origin = message.origin["topic"] if message.origin is not None else topic
    return viewer.allows(UNMASK, topic) and viewer.allows(UNMASK, origin)


def require_unmask(request: Request, topic: str, message: Message) -> None:
    """Raises Forbidden: the viewer may not see the masked fields of a message."""
    viewer = require(request, UNMASK, topic)
    if not may_unmask(viewer, topic, message):
        assert message.origin is not None
        raise Forbidden(f"This needs the role {UNMASK} on topic {message.origin['topic']}, too.")
