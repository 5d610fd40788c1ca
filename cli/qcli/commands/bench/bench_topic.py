"""The topics of measurements: by default each run has its own one, and deletes it at the end."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ...broker.address_options import HTTP_OPTION
from ...broker.admin_client import AdminClient
from ...framework.errors import ExitCode, Failure
from ...framework.output import print_diagnostic
from ...terminal.confirm import confirm
from .targets import Target

PREFIX = "bench-"
"""Topics with these names are for measurements: their messages may be consumed without a question."""
CHANNEL = "bench"


def new_name() -> str:
    """Return a name for the topic of a run."""
    return f"{PREFIX}{secrets.token_hex(4)}"


def check_consent(topic: str, what: str, agreed: bool) -> None:
    """Return if the messages of a topic may be consumed: it is for measurements, or the user agrees.

    Args:
        what: What the command does, as a sentence without a full stop.
        agreed: The value of `--yes`.

    Raises:
        click.UsageError: The user has to agree, and there is no terminal.
        Failure: The user does not agree.
    """
    if not (agreed or topic.startswith(PREFIX)):
        confirm(f"{what}. Continue?", what)


@contextmanager
def own_topic(targets: Sequence[Target], *, keep: bool, channel: str | None = None) -> Iterator[str]:
    """Create a topic on all brokers for the block, and yield its name.

    Args:
        keep: Do not delete it at the end.
        channel: Create this channel, too.

    Raises:
        click.UsageError: A broker's HTTP address is not known.
        Failure: A broker refuses or does not answer. `PARTIAL`: the block has ended, and the topic is not deleted.
    """
    brokers = [target.admin() for target in targets]
    topic = new_name()
    try:
        for broker in brokers:
            broker.request("POST", "/topic/create", {"topic": topic})
            if channel is not None:
                broker.request("POST", "/channel/create", {"topic": topic, "channel": channel})
        yield topic
    finally:
        if keep:
            print_diagnostic(f"Topic {topic} is kept.")
        else:
            _delete(brokers, topic)


def _delete(brokers: Sequence[AdminClient], topic: str) -> None:
    failures: dict[str, Failure] = {}
    for broker in brokers:
        try:
            broker.request("POST", "/topic/delete", {"topic": topic})
        except Failure as error:
            failures[broker.address] = error
    if failures:
        options = " ".join(f"{HTTP_OPTION} {address}" for address in failures)
        raise Failure(
            f"Topic {topic} was not deleted: {next(iter(failures.values())).message} "
            f"Later, delete it: 'qcli topic delete {topic} --yes {options}'.",
            ExitCode.PARTIAL,
        )
