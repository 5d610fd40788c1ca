"""Requests for what only `qcli serve` has, and not nsqd: settings, dead letters, deferred messages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..framework.errors import Failure, NotFound
from ..framework.params import Source

_FOR_THE_USER = ("INVALID_SETTING: ", "INVALID_ID: ")
"""Codes in front of sentences that say all there is to say."""


def get_json(address: str, wanted: Source, path: str, params: Mapping[str, str], what: str) -> Any:
    """Ask the broker something about a topic or channel, and return the JSON it answers with.

    Args:
        address: `host:port`.
        wanted: The topic or channel.
        path, params: Of the request, without the names.
        what: What is said of a broker that does not have this, such as `has no dead letters`.

    Raises:
        Failure: There is no such answer.
    """
    (answer,) = _request("GET", address, wanted, path, params, what)
    return answer


class ChannelNotFound(NotFound):
    """There is no such channel."""


def get_json_lines(
    address: str, wanted: Source, path: str, params: Mapping[str, str], what: str
) -> list[Any]:
    """The same of an answer with an object per line."""
    return _request("GET", address, wanted, path, params, what, lines=True)


def post_json(address: str, wanted: Source, path: str, params: Mapping[str, str], what: str) -> Any:
    """Tell the broker to do something, likewise."""
    (answer,) = _request("POST", address, wanted, path, params, what)
    return answer


def put_json(
    address: str, wanted: Source, path: str, params: Mapping[str, str], value: object, what: str
) -> Any:
    """Send the broker something, likewise."""
    body = json.dumps(value).encode()
    (answer,) = _request("PUT", address, wanted, path, params, what, body)
    return answer


def _request(
    method: str,
    address: str,
    wanted: Source,
    path: str,
    params: Mapping[str, str],
    what: str,
    body: bytes | None = None,
    *,
    lines: bool = False,
) -> list[Any]:
    """The JSON of an answer, of each of its lines or of all of it."""
    from .admin_client import AdminClient, Refused

    names = {"topic": wanted.topic} if wanted.topic else {}
    if wanted.channel is not None:
        names["channel"] = wanted.channel
    broker = AdminClient(address)
    try:
        answer = broker.request(method, path, names | dict(params), body)
    except Refused as error:
        raise refusal(address, wanted, error.text, what) or error from error
    return [broker.decoded(line) for line in (answer.splitlines() if lines else [answer])]


def refusal(address: str, wanted: Source, text: str, what: str) -> Failure | None:
    """The failure that a broker's code says; None: it is another code. The arguments are those of `get_json`."""
    if text == "NOT_FOUND":  # that is, the endpoint
        return Failure(f"The broker at {address} {what}: it is an nsqd, or an older 'qcli serve'.")
    if text == "TOPIC_NOT_FOUND":
        return NotFound(f"There is no topic {wanted.topic} on {address}.")
    if text == "CHANNEL_NOT_FOUND":
        if wanted.channel is None:  # the one that a dead-letter topic has
            return NotFound(f"Topic {wanted.topic} on {address} never had a dead letter.")
        return ChannelNotFound(f"There is no channel {wanted} on {address}.")
    for code in _FOR_THE_USER:
        if text.startswith(code):
            return Failure(f"{text.removeprefix(code)}.")
    return None
