"""Which dead letters a command is about: its options, and their requests."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import click

from ...broker.name_completion import complete_source, complete_topic_with
from ...framework.options import all_of, count_option, option
from ...framework.params import Source, message_id, source, topic_name

REASONS = ("requeued", "timed_out", "connection_lost")

OUTPUT, SELECTION = "Output", "Which letters"

WHAT = "has no dead letters"

CHANNEL = "dead-letters"

complete_dead_letter_topic = complete_topic_with(CHANNEL)

_IDS_AT_ONCE = 500

NOTE = (
    "A message that comes back from its channel's last attempt (see 'qcli channel set', max_attempts) goes to the "
    "channel's dead_letter_topic, with its body as it is. Such a topic is like any other, but that it has a channel "
    f"{CHANNEL} from its first letter on. What waits there is what these commands are about. A consumer of that "
    "channel takes letters away by finishing them; any other channel gets copies."
)


topic_argument = click.argument(
    "topic", metavar="TOPIC", type=topic_name, shell_complete=complete_dead_letter_topic
)

selection_options = all_of(
    option(
        SELECTION,
        "--origin",
        type=source,
        metavar="TOPIC[/CHANNEL]",
        shell_complete=complete_source,
        help="Only those from this topic, or from this channel of it.",
    ),
    option(
        SELECTION,
        "--reason",
        type=click.Choice(REASONS),
        help="Only those that came back so from their last delivery.",
    ),
    option(
        SELECTION,
        "--id",
        "ids",
        type=message_id,
        metavar="ID",
        multiple=True,
        help="Only the letter with this id, its own one; may be given several times.",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The dead letters that a command is about; the fields are its parameters. None, and no ids: no restriction.

    Attributes:
        topic: The dead-letter topic.
        count: At most so many on all brokers together; also 0 where that is a number: all.
    """

    topic: str
    nsqd_http_addresses: tuple[str, ...]
    origin: Source | None
    reason: str | None
    ids: Sequence[str]
    count: int | None

    @property
    def is_narrow(self) -> bool:
        """Whether not all letters of the topic are meant."""
        return bool(self.origin or self.reason or self.ids or self.count)

    def params(self) -> dict[str, str]:
        """The parameters of a request that select by origin and reason."""
        params = {"origin": str(self.origin)} if self.origin is not None else {}
        return params | ({"reason": self.reason} if self.reason is not None else {})

    def pages(self) -> Iterator[dict[str, str]]:
        """The ids as parameters, not too many at a time; without any one page for all letters."""
        if not self.ids:
            yield {}
        for start in range(0, len(self.ids), _IDS_AT_ONCE):
            yield {"id": ",".join(self.ids[start : start + _IDS_AT_ONCE])}

    def why_none(self) -> str:
        """What is added where no letter was found."""
        of_these = f" from {self.origin}" if self.origin is not None else ""
        of_these += f" with the reason {self.reason}" if self.reason is not None else ""
        return f": no letter{of_these} waits there"


at_most_option = count_option(SELECTION, "No more than so many: the oldest. Not given: all.")
