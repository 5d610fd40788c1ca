"""`qcli definitions export`: writes topics, channels and their settings as one document."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ...broker.brokers import Brokers, broker_http_options, combined
from ...framework.command import DocumentedCommand
from ...framework.errors import ExitCode, Failure
from ...framework.options import option
from ...framework.output import print_diagnostic, write

if TYPE_CHECKING:
    from trio_nsq.fleet.definitions.model import Topics


@click.command(
    "export",
    cls=DocumentedCommand,
    short_help="Write topics, channels and their settings as JSON.",
    examples={
        "write what a broker has to a file": "qcli definitions export > definitions.json",
        "export some topics": "qcli definitions export --topic 'orders*'",
        "copy what an nsqd has to a broker": "qcli definitions export --nsqd-http-address 10.0.0.7:4151 | "
        "qcli definitions apply -",
    },
    exits={
        ExitCode.FAILURE: "Nothing was written: brokers differ, a topic cannot be used, or a broker did not answer.",
        ExitCode.UNREACHABLE: ExitCode.UNREACHABLE.meaning,
    },
    details={
        "Document": "JSON: version (1) and topics. A topic, by its name, has settings and channels; a channel has "
        "settings. Settings have the names and values of 'qcli topic set' and 'qcli channel set'. Only those that are "
        "set are written: the others have the broker's defaults. A topic or channel that is paused has paused. The "
        "order is that of the names, so that versions can be compared. docs/how-to/definitions.md has an example.",
        "Left out": "Messages, positions of channels, and ephemeral topics and channels.",
        "Several brokers": "One document for all. A topic or channel that some brokers lack is noted on standard "
        "error: 'qcli definitions apply' creates it there. If a setting or a pause differs, nothing is written, and "
        "the error names each difference: export the broker that is right, and apply its document to all.",
    },
)
@broker_http_options
@option(
    "Options",
    "--topic",
    "patterns",
    multiple=True,
    metavar="PATTERN",
    help="Export only topics that match this pattern, such as 'log*'. Repeat the option for several.",
)
def command(brokers: Brokers, patterns: tuple[str, ...]) -> None:
    """Write topics, channels and their settings as one JSON document.

    With several brokers, the document is that of all.
    """
    from trio_nsq.fleet.definitions.differences import together
    from trio_nsq.fleet.definitions.document import matching, to_text
    from trio_nsq.fleet.definitions.model import DefinitionsError

    from ...broker.admin_client import AdminClient
    from ...broker.rights import identity_at
    from .reading import definitions_of

    limited: list[str] = []

    def read(address: str) -> Topics:
        broker = AdminClient(address)
        found = definitions_of(broker)
        if found.unsupported is None:
            identity = identity_at(broker)
            if identity is not None and not identity.allows_everywhere("read"):
                limited.append(address)
        return matching(found.topics, patterns)

    answers = brokers.ask(read)
    if answers.failures:  # a document without what a broker has would be taken for complete
        raise combined(answers.failures.values(), partial=False)
    found = together(answers.results)
    unusable = [
        f'The topic "{name}" cannot be used: {each.unavailable}.'
        for name, each in found.topics.items()
        if each.unavailable
    ]
    if problems := unusable or found.differences:
        about = "" if unusable else "The brokers differ. Export one of them, and apply its document to all. "
        raise Failure(
            about + "\n  ".join(problems) if len(problems) == 1 else "\n  ".join([about, *problems])
        )
    try:
        text = to_text(found.topics)
    except DefinitionsError as error:
        raise Failure("\n  ".join(error.problems)) from error
    if patterns and not found.topics:
        print_diagnostic(f"Note: no topic matches {' or '.join(patterns)}.")
    if limited:
        print_diagnostic(
            "Note: your secret may read only some topics and channels of "
            f"{' and '.join(sorted(limited))}. The document "
            "has no others: do not apply it with --delete."
        )
    for sentence in found.lacking:
        print_diagnostic(f"Note: {sentence}")
    write(text)
