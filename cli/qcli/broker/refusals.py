"""Failures for the answers of a broker that refuses a request, above all for missing topics and channels."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from ..contexts.choice import chosen_context
from ..framework.command import did_you_mean
from ..framework.errors import Failure
from ..framework.params import Source
from .address_options import DEFAULT_HTTP_ADDRESS, HTTP_OPTION, HTTP_VARIABLE, LOOKUPD_OPTION
from .at_once import at_once
from .failures import http_failure, not_a_broker
from .wrong_ports import is_other_server

if TYPE_CHECKING:
    from trio_nsq.client import RequestRefused


class Unsupported(Failure):
    """A broker does not have a request, as an nsqd, or is no member of a cluster.

    In a fleet, what is read from the others is complete.
    """


CANNOT_BE_READ = "cannot be read by sequence or time"
"""The text for a broker without the requests to read logs; see `refusal`."""

_FOR_THE_USER = ("INVALID_SETTING: ", "INVALID_ID: ")
"""Codes before complete messages for the user."""
_OF_CLUSTERS = {
    "REFUSED: ": "Nothing was changed",
    "COORDINATOR: ": "The coordinator of the cluster does not answer",
}
"""Codes before the reason why a cluster was not changed, and the beginning of the message."""


class NotFound(Failure):
    """A broker does not have a topic or channel; another broker may have it.

    Attributes:
        wanted: The topic or channel; None: something else is missing.
        creation: Whether the message says how to create it.
    """

    def __init__(
        self, message: str, *, brief: str = "", wanted: Source | None = None, creation: bool = True
    ) -> None:
        super().__init__(message, brief=brief)
        self.wanted = wanted
        self.creation = creation


class ChannelNotFound(NotFound):
    """A broker does not have this channel."""


def missing(wanted: Source, *addresses: str, creation: bool = True) -> NotFound:
    """Return the failure for a topic or channel that none of these brokers has.

    It suggests a similar name if a broker has one, and says how to create the topic or channel, unless `creation` is
    False, as for a command that deletes it.
    """
    topics = _topics(addresses)
    where = listed(addresses, "or")
    at = _address_option(addresses)
    if wanted.channel is None or (topics and wanted.topic not in topics):
        kind, name, known, also = "topic", wanted.topic, list(topics), ", or publish to it"
    else:
        kind, name, known, also = "channel", wanted.channel, topics.get(wanted.topic, []), ""
    source = wanted if kind == "channel" else Source(wanted.topic, None)
    brief = f'{kind.capitalize()} "{source}" does not exist on {where}'
    advice = f" Create it with 'qcli {kind} create {source}{at}'{also}." if creation else ""
    failure = NotFound if kind == "topic" else ChannelNotFound
    return failure(
        f"{brief}{did_you_mean(name, known)}.{advice}", brief=f"{brief}.", wanted=wanted, creation=creation
    )


def _topics(addresses: Sequence[str]) -> dict[str, list[str]]:
    """Return the names of the channels of these brokers by topic, without those of brokers that do not answer."""
    from .admin_client import AdminClient, channels_by_topic

    answers = at_once(addresses, lambda address: AdminClient(address).stats()["topics"])
    topics = [topic for answer in answers.values() if not isinstance(answer, Failure) for topic in answer]
    return channels_by_topic(topics)


def listed(names: Sequence[str], word: str) -> str:
    """Return the names as a list for people: "a, b or c"."""
    return f" {word} ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _address_option(addresses: Sequence[str]) -> str:
    """Return the options that a command needs to reach these brokers; empty if it does not need any."""
    ctx = click.get_current_context(silent=True)
    if ctx is not None:
        typed = {
            option: ",".join(ctx.params[name])
            for option, name in ((HTTP_OPTION, "nsqd_http_addresses"), (LOOKUPD_OPTION, "lookupd_addresses"))
            if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
        }
        if typed:
            return "".join(f" {option} {value}" for option, value in typed.items())
        if chosen_context(ctx) is not None:
            return ""
    usual = os.environ.get(HTTP_VARIABLE) or DEFAULT_HTTP_ADDRESS
    return "" if len(addresses) > 1 or addresses[0] == usual else f" {HTTP_OPTION} {addresses[0]}"


def not_found(address: str, wanted: Source, text: str, *, creation: bool = True) -> NotFound | None:
    """Return the failure for a broker's code about a topic or channel; None: it is another code.

    `creation`: see `missing`.
    """
    if text == "TOPIC_NOT_FOUND":
        return missing(Source(wanted.topic, None), address, creation=creation)
    if text == "CHANNEL_NOT_FOUND":
        if wanted.channel is None:  # the channel of a dead-letter topic
            brief = f'Topic "{wanted.topic}" on {address} never had a dead letter.'
            return NotFound(f"{brief} 'qcli dlq list' lists the topics that have.", brief=brief)
        return missing(wanted, address, creation=creation)
    return None


def refusal(address: str, wanted: Source, text: str, what: str) -> Failure | None:
    """Return the failure for a broker's code to a request that nsqd does not have; None: it is another code.

    `what` completes the error for a broker without this request, such as `has no dead letters`.
    """
    if text == "NOT_FOUND":  # that is, the endpoint
        return Unsupported(f"The broker at {address} {what}: it is an nsqd, or an older 'qcli serve'.")
    if text.startswith("NO_CLUSTER"):
        return Unsupported(
            f"The broker at {address} is not a member of a cluster: see 'qcli serve --cluster'."
        )
    for code, begin in _OF_CLUSTERS.items():
        if text.startswith(code):
            return Failure(f"{begin}: {text.removeprefix(code)}.")
    for code in _FOR_THE_USER:
        if text.startswith(code):
            return Failure(f"{text.removeprefix(code)}.")
    return not_found(address, wanted, text)


def read_failure(error: RequestRefused) -> Failure:
    if error.text == "NOT_FOUND" and is_other_server(error.address):
        return not_a_broker(error.address)
    return refusal(error.address, Source(error.topic, None), error.text, CANNOT_BE_READ) or http_failure(
        error
    )
