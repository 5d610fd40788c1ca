"""Failures for the answers of a broker that refuses a request, above all for missing topics and channels."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ..framework.command import did_you_mean
from ..framework.errors import Failure
from ..framework.params import Source
from .address_options import DEFAULT_HTTP_ADDRESS, HTTP_OPTION, HTTP_VARIABLE
from .failures import http_failure

if TYPE_CHECKING:
    from trio_nsq.client import RequestRefused

CANNOT_BE_READ = "cannot be read by sequence or time"
"""The text for a broker without the requests to read logs; see `refusal`."""

_FOR_THE_USER = ("INVALID_SETTING: ", "INVALID_ID: ")
"""Codes before complete messages for the user."""


class NotFound(Failure):
    """A broker does not have this topic or channel; another broker may have it."""


class ChannelNotFound(NotFound):
    """A broker does not have this channel."""


def missing(wanted: Source, *addresses: str, creation: bool = True) -> NotFound:
    """Return the failure for a topic or channel that none of these brokers has.

    It suggests a similar name if a broker has one, and says how to create the topic or channel, unless `creation` is
    False, as for a command that deletes it.
    """
    topics = _topics(addresses)
    where = " or ".join(addresses)
    at = _address_option(addresses[0])
    if wanted.channel is None or (topics and wanted.topic not in topics):
        return NotFound(
            f'Topic "{wanted.topic}" does not exist on {where}{did_you_mean(wanted.topic, list(topics))}.'
            + (
                f" Create it with 'qcli topic create {wanted.topic}{at}', or publish to it."
                if creation
                else ""
            )
        )
    hint = did_you_mean(wanted.channel, topics.get(wanted.topic, []))
    return ChannelNotFound(
        f'Channel "{wanted}" does not exist on {where}{hint}.'
        + (f" Create it with 'qcli channel create {wanted}{at}'." if creation else "")
    )


def _topics(addresses: Iterable[str]) -> dict[str, list[str]]:
    """Return the names of the channels of these brokers by topic; nothing of a broker that does not answer."""
    from .admin_client import AdminClient, channels_by_topic

    topics: list[Mapping[str, Any]] = []
    for address in addresses:
        try:
            topics += AdminClient(address).stats()["topics"]
        except Failure:
            continue
    return channels_by_topic(topics)


def _address_option(address: str) -> str:
    """Return the option that a command needs to reach this broker; empty if it does not need one."""
    usual = os.environ.get(HTTP_VARIABLE) or DEFAULT_HTTP_ADDRESS
    return "" if address == usual else f" {HTTP_OPTION} {address}"


def not_found(address: str, wanted: Source, text: str, *, creation: bool = True) -> NotFound | None:
    """Return the failure for a broker's code about a topic or channel; None: it is another code.

    `creation`: see `missing`.
    """
    if text == "TOPIC_NOT_FOUND":
        return missing(Source(wanted.topic, None), address, creation=creation)
    if text == "CHANNEL_NOT_FOUND":
        if wanted.channel is None:  # the channel of a dead-letter topic
            return NotFound(
                f'Topic "{wanted.topic}" on {address} never had a dead letter. '
                "'qcli dlq list' lists the topics that have."
            )
        return missing(wanted, address, creation=creation)
    return None


def refusal(address: str, wanted: Source, text: str, what: str) -> Failure | None:
    """Return the failure for a broker's code to a request that nsqd does not have; None: it is another code.

    `what` completes the error for a broker without this request, such as `has no dead letters`.
    """
    if text == "NOT_FOUND":  # that is, the endpoint
        return Failure(f"The broker at {address} {what}: it is an nsqd, or an older 'qcli serve'.")
    for code in _FOR_THE_USER:
        if text.startswith(code):
            return Failure(f"{text.removeprefix(code)}.")
    return not_found(address, wanted, text)


def read_failure(error: RequestRefused) -> Failure:
    """Return the failure for a refused request to read a topic's log."""
    return refusal(error.address, Source(error.topic, None), error.text, CANNOT_BE_READ) or http_failure(
        error
    )
