"""Requests of commands to a broker that may not have them, or not have the topic or channel."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, TypeVar

from trio_nsq.api import broker as api
from trio_nsq.api.request import Procedure, Request, run

from ..framework.params import Source
from .failures import Refused, not_a_broker
from .refusals import refusal

if TYPE_CHECKING:
    from trio_nsq.api.answers import MemberView

    from .admin_client import AdminClient

_T = TypeVar("_T")


def ask(address: str, request: Request[_T]) -> _T:
    """Make a request that nsqd does not have, and return the answer.

    Raises:
        Failure: The broker refused or did not answer, or the answer is not a broker's.
    """
    from .admin_client import AdminClient

    return ask_client(AdminClient(address), request)


def perform(address: str, procedure: Procedure[_T]) -> _T:
    """Run a procedure of such requests, and return its result. Raises Failure as `ask`."""
    from .admin_client import AdminClient

    try:
        return run(procedure, partial(ask_client, AdminClient(address)))
    except ValueError as error:
        raise not_a_broker(address) from error


def ask_client(broker: AdminClient, request: Request[_T]) -> _T:
    """Make such a request to the broker of a client. Raises Failure as `ask`."""
    try:
        return broker.ask(request)
    except Refused as error:
        wanted = Source(request.params.get("topic", ""), request.params.get("channel"))
        raise refusal(broker.address, wanted, error.text, request.lacking) or error from error


def member_at(broker: AdminClient) -> MemberView:
    """Return the member of a cluster that listens at the address of a client.

    Raises:
        Unsupported: The broker is no member of a cluster.
        Failure: As `ask`.
    """
    try:
        return broker.member()
    except Refused as error:
        raise refusal(broker.address, Source("", None), error.text, api.member().lacking) or error from error
