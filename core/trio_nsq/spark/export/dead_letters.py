"""Publish the messages that do not fit the columns of an export to a dead-letter topic of their broker.

They are published before the result of their range is stored. If the export is killed in between, the range is exported
again, and its dead letters are published again: at least once.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...api import broker as api
from ...client.errors import RequestRefused
from ...client.http.broker_http import BrokerHTTP
from ...fleet.dead_letters import CHANNEL
from ...protocol.headers import encode_headers, split_for_hpub
from ...protocol.limits import MIB
from ...protocol.names import MAX_NAME_LENGTH, is_valid_name
from ..logs import BrokerPlace
from .layout import LayoutError

TOPIC_PLACE = "{topic}"
"""What the name of a message's topic replaces in the name of a dead-letter topic."""
PREFIX = "dead-letter-"
"""The names of the headers that a dead letter gets begin with it."""
_MAX_REQUEST_BYTES = MIB
_MAX_VALUE_CHARS = 500
_CONTROL = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")


def letters_topic(template: str, topic: str) -> str | None:
    """Return the dead-letter topic of a topic; None: it is one itself, whose messages must not go around in circles.

    Args:
        template: The name, in which `{topic}` stands for the topic.
    """
    pattern = re.escape(template).replace(re.escape(TOPIC_PLACE), ".+")
    return None if re.fullmatch(pattern, topic) else template.replace(TOPIC_PLACE, topic)


def check_letters_topic(name: str, topic: str) -> None:
    """Check the name of the dead-letter topic of a topic. Raises LayoutError."""
    if not is_valid_name(name):
        raise LayoutError(
            f"the dead-letter topic of {topic} would be {name}, which is no name of a topic: at most {MAX_NAME_LENGTH} "
            "letters, digits and . _ -. Give another --dead-letter-topic"
        )


@dataclass(frozen=True, slots=True)
class Letter:
    """A message that does not fit the columns.

    Attributes:
        reason: Why it does not fit, such as `is no JSON object`.
    """

    sequence: int
    body: bytes
    headers: Mapping[str, str]
    reason: str


class LetterPublisher:
    """Publishes the dead letters of one topic of a broker.

    Args:
        place: The topic.
        letters_topic: Where they are published, on the same broker.
    """

    def __init__(self, place: BrokerPlace, letters_topic: str) -> None:
        self._place = place
        self._topic = letters_topic
        self._http = BrokerHTTP(place.address, place.tls, place.secret)
        self._is_ready = False

    def publish(self, letters: Sequence[Letter]) -> None:
        """Publish the letters. Returns when the broker has stored them.

        Raises:
            BrokerUnreachable: The broker does not answer; some of them may be stored.
            RequestRefused: The broker refuses them, or has no headers.
        """
        if not letters:
            return
        if not self._is_ready:
            self._create()
        bodies, texts = [each.body for each in letters], [self._headers_of(each) for each in letters]
        for part in split_for_hpub(bodies, texts, _MAX_REQUEST_BYTES):
            self._http.ask(
                api.publish_with_headers(self._topic, body=len(part).to_bytes(4, "big") + part.data)
            )

    def close(self) -> None:
        self._http.close()

    def _create(self) -> None:
        """Create the topic with the channel in which `qcli dlq` looks; it must exist before other channels."""
        try:
            self._http.ask(api.act("create", self._topic))
            self._http.ask(api.act("create", self._topic, CHANNEL))
        except RequestRefused as error:
            if not error.is_about_secret:
                raise
            # The secret may publish there, and manage nothing: the topic is created by the publish.
        self._is_ready = True

    def _headers_of(self, letter: Letter) -> str:
        """Return the message's own headers with the origin; only its own, if they leave no room."""
        origin = {
            "topic": self._place.topic,
            "broker": self._place.label,
            "sequence": str(letter.sequence),
            "reason": _CONTROL.sub("\ufffd", letter.reason)[:_MAX_VALUE_CHARS],
        }
        try:
            return encode_headers(
                {**letter.headers, **{f"{PREFIX}{name}": value for name, value in origin.items()}}
            )
        except ValueError:
            return encode_headers(letter.headers)
