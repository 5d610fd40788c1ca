"""Asks a broker for its definitions."""

from typing import NamedTuple

from trio_nsq.api import broker as api
from trio_nsq.fleet.definitions.model import Topics, of_broker, of_stats

from ...broker.admin_client import AdminClient
from ...broker.failures import not_a_broker
from ...broker.refusals import Unsupported
from ...broker.requests import ask_client


class Found(NamedTuple):
    """What a broker has.

    Attributes:
        unsupported: The failure of a broker without settings, an nsqd; None: it has settings.
    """

    topics: Topics
    unsupported: Unsupported | None = None


def definitions_of(broker: AdminClient) -> Found:
    """Return what a broker has. Raises Failure: it does not answer, refuses, or the answer is not a broker's."""
    try:
        answer = ask_client(broker, api.definitions())
    except Unsupported as error:
        return Found(of_stats(broker.stats()), error)
    try:
        return Found(of_broker(answer))
    except ValueError as error:
        raise not_a_broker(broker.address) from error
