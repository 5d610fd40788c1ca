"""JSON requests to one broker, or to each of several brokers."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from ..framework.errors import ExitCode, Failure
from ..framework.params import Source
from .connection_options import refuse_plain_http
from .failures import Refused
from .refusals import NotFound, refusal

_T = TypeVar("_T")


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


def change_each(addresses: Sequence[str], act: Callable[[str], _T]) -> list[_T]:
    """Make a change on every broker, also after a failure of another one. `act` reports its change.

    Raises:
        Failure: A broker failed. With several brokers, the message has the failure of each, and the code is
            `PARTIAL` if a change was made.
        click.UsageError: An address is not allowed; nothing was changed.
    """
    for address in addresses:
        refuse_plain_http(address)
    if len(addresses) == 1:
        return [act(addresses[0])]
    results: list[_T] = []
    failures: list[Failure] = []
    for address in addresses:
        try:
            results.append(act(address))
        except Failure as error:
            text = error.message if address in error.message else f"{address}: {error.message}"
            failures.append(Failure(text, error.exit_code))
    if not failures:
        return results
    codes = {failure.exit_code for failure in failures}
    partial = bool(results) or ExitCode.PARTIAL in codes
    code = ExitCode.PARTIAL if partial else codes.pop() if len(codes) == 1 else ExitCode.FAILURE
    raise Failure(" ".join(failure.message for failure in failures), code)


def read_each(addresses: Sequence[str], read: Callable[[str], _T]) -> dict[str, _T]:
    """Read from every broker that has the topic or channel, and return the results by address.

    Raises Failure: a broker does not answer or refuses, or no broker has the topic or channel.
    """
    results: dict[str, _T] = {}
    missing: NotFound | None = None
    for address in addresses:
        try:
            results[address] = read(address)
        except NotFound as error:
            missing = missing or error
    if missing is not None and not results:
        raise missing
    return results


def read_records(
    addresses: Sequence[str], read: Callable[[str], Iterable[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Return the records of all brokers, one broker after the other, with the broker's address if there are several."""
    found = read_each(addresses, read)
    return [record for address in found for record in with_broker(found[address], address, addresses)]


def broker_suffix(address: str, addresses: Sequence[str]) -> str:
    """Return the end of a report about one of several brokers; empty if there is only one."""
    return f" on {address}" if len(addresses) > 1 else ""


def with_broker(
    records: Iterable[dict[str, Any]], address: str, addresses: Sequence[str]
) -> list[dict[str, Any]]:
    """Add the broker's address to records if there are several brokers."""
    return [{"broker": address, **record} for record in records] if len(addresses) > 1 else list(records)
