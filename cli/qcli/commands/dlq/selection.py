"""The selection of dead letters: options, and the parameters of requests."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import click

from trio_nsq.fleet.dead_letters import CHANNEL, REASONS, LetterFilter

from ...broker.brokers import Brokers
from ...broker.name_completion import complete_source, complete_topic_with
from ...framework.options import all_of, count_option, option
from ...framework.params import Source, message_id, source, topic_name

OUTPUT, SELECTION = "Output", "Which dead letters"

complete_dead_letter_topic = complete_topic_with(CHANNEL)

_IDS_AT_ONCE = 500

NOTE = (
    "If a message fails after max_attempts deliveries (see 'qcli channel set'), the broker publishes its unchanged "
    "body to the channel's dead_letter_topic. That is an ordinary topic with a channel "
    f"{CHANNEL}, which is created with the first dead letter. The commands work on the messages in that channel. A "
    "consumer of the channel removes dead letters by finishing them; other channels of the topic get copies."
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
        help="Select dead letters of this topic or channel.",
    ),
    option(
        SELECTION,
        "--reason",
        type=click.Choice(REASONS),
        help="Select dead letters whose last delivery ended this way.",
    ),
    option(
        SELECTION,
        "--id",
        "ids",
        type=message_id,
        metavar="ID",
        multiple=True,
        help="Select the dead letter with this id. May be repeated.",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The dead letters that a command works on; the fields are its parameters. None, or no ids: no restriction.

    Attributes:
        topic: The dead-letter topic.
        count: The maximum over all brokers; 0 or None: all.
    """

    topic: str
    brokers: Brokers
    origin: Source | None
    reason: str | None
    ids: Sequence[str]
    count: int | None

    @property
    def is_narrow(self) -> bool:
        """Whether it excludes any dead letter of the topic."""
        return bool(self.origin or self.reason or self.ids or self.count)

    @property
    def chosen(self) -> LetterFilter:
        """The letters, without regard to ids."""
        return LetterFilter(self.topic, None if self.origin is None else str(self.origin), self.reason)

    def pages(self) -> Iterator[Sequence[str]]:
        """Yield the ids in pages; without ids, an empty page for all dead letters."""
        if not self.ids:
            yield ()
        for start in range(0, len(self.ids), _IDS_AT_ONCE):
            yield self.ids[start : start + _IDS_AT_ONCE]

    def why_none(self) -> str:
        """Return the end of a report that no dead letter was found."""
        of_these = f" from {self.origin}" if self.origin is not None else ""
        of_these += f" with the reason {self.reason}" if self.reason is not None else ""
        return f": no dead letters{of_these}"


at_most_option = count_option(SELECTION, "Select at most N dead letters, the oldest. By default select all.")
