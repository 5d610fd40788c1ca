"""JSON requests to a broker."""

import json
from collections.abc import Mapping
from typing import Any

from ..framework.params import Source
from .failures import Refused, not_a_broker
from .refusals import CANNOT_BE_READ, refusal


def request_json(
    method: str,
    address: str,
    wanted: Source,
    path: str,
    params: Mapping[str, str],
    what: str,
    *,
    value: object = None,
    lines: bool = False,
) -> Any:
    """Send a request that nsqd does not have, and return the JSON of the answer.

    Args:
        method: The HTTP method.
        address: The broker's HTTP address.
        wanted: The topic or channel; with an empty name, the request has no topic.
        path, params: The path and parameters, without the names of topic and channel.
        what: Completes the error for a broker without this request, such as `has no dead letters`.
        value: The body, sent as JSON; None: no body.
        lines: Whether the answer has an object per line; the result is then a list.

    Raises:
        Failure: The broker refused or did not answer.
    """
    from .admin_client import AdminClient

    names = {"topic": wanted.topic} if wanted.topic else {}
    if wanted.channel is not None:
        names["channel"] = wanted.channel
    broker = AdminClient(address)
    body = None if value is None else json.dumps(value).encode()
    try:
        answer = broker.request(method, path, names | dict(params), body)
    except Refused as error:
        raise refusal(address, wanted, error.text, what) or error from error
    return [broker.decoded(line) for line in answer.splitlines()] if lines else broker.decoded(answer)


def topic_bounds(address: str, topic: str) -> dict[str, int]:
    """Return the bounds of a topic's log: `first_sequence`, and `next_sequence`, the next one to be assigned.

    Raises Failure: as `request_json`, or the server is not a broker.
    """
    found = request_json("GET", address, Source(topic, None), "/topic/bounds", {}, CANNOT_BE_READ)
    try:
        return {name: int(found[name]) for name in ("first_sequence", "next_sequence")}
    except (KeyError, TypeError, ValueError):
        raise not_a_broker(address) from None
