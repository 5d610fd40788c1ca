"""A request to a broker or a discovery service as data, and how its answer is read."""

from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from urllib.parse import urlencode

from ..protocol.untrusted_json import decode_json

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

Decoder = Callable[[bytes], Any]
"""Decodes JSON. Raises ValueError."""


@dataclass(frozen=True, slots=True)
class Request(Generic[T_co]):
    """A request. `BrokerHTTP.ask` makes it with blocking calls, `Upstream.ask` under trio.

    Attributes:
        read: Returns the answer from its body. Raises ValueError: no such server answers like that.
        params: The query.
        lacking: Completes a sentence about a broker that does not have this request, as an nsqd, such as `has no dead
            letters`; empty: every broker has it.
    """

    method: str
    path: str
    read: Callable[[bytes, Decoder], T_co]
    params: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    lacking: str = ""

    @property
    def target(self) -> str:
        """The path with the query, encoded."""
        return f"{self.path}?{urlencode(self.params)}" if self.params else self.path


Procedure = Generator[Request[Any], Any, T]
"""Requests to one server, one after the other: it yields each, is sent its answer, and returns a result.

What a transport cannot get is thrown into it, so that it can keep what was done before.
"""


def ask(request: Request[T]) -> Procedure[T]:
    """Make a request within a procedure: `answer = yield from ask(request)`."""
    answer: T = yield request
    return answer


async def perform(procedure: Procedure[T], make: Callable[[Request[Any]], Awaitable[Any]]) -> T:
    """Run a procedure with a function that makes requests, and return its result.

    Raises ValueError: the answers do not belong together.
    """
    try:
        request = next(procedure)
        while True:
            try:
                answer = await make(request)
            except Exception as error:
                request = procedure.throw(error)
            else:
                request = procedure.send(answer)
    except StopIteration as end:
        result: T = end.value
        return result


def run(procedure: Procedure[T], make: Callable[[Request[Any]], Any]) -> T:
    """Run a procedure as `perform`, with a function that makes requests with blocking calls."""

    async def make_now(request: Request[Any]) -> Any:
        return make(request)

    try:
        perform(procedure, make_now).send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("a coroutine that awaits nothing has not ended")


def message_of(body: bytes) -> str:
    """Return the message of an error answer; empty: it is not that of a broker."""
    try:
        message = decode_json(body)["message"]
    except (ValueError, KeyError, TypeError):
        return ""
    return message if isinstance(message, str) else ""


def following(start: int, sequence: int | None) -> int | None:
    """Return the sequence of the next page of an answer, after the one from `start` on; None: it was the last.

    Raises ValueError: the next page is not after this one.
    """
    if sequence is not None and sequence <= start:
        raise ValueError("the next page is not after this one")
    return sequence


Value = str | int | bool | Sequence[str] | None


def parameters(values: Mapping[str, Value]) -> dict[str, str]:
    """Return the query of these values: without those that are None, False or an empty list."""
    return {name: text for name, value in values.items() if (text := _text(value)) is not None}


def _text(value: Value) -> str | None:
    if value is None or value is False:
        return None
    if isinstance(value, str | int):
        return "true" if value is True else str(value)
    return ",".join(value) or None


class Endpoint(Generic[T_co]):
    """A request without its parameters: call it with them, in their order or by their names.

    Args:
        name: The method and the path.
        read: As for `Request`.
        params: The names of the parameters, separated by blanks. `start=from` is `from` in the query.
        lacking: As for `Request`.
    """

    def __init__(
        self, name: str, read: Callable[[bytes, Decoder], T_co], params: str = "", lacking: str = ""
    ) -> None:
        self.method, _, self.path = name.partition(" ")
        self._read = read
        self._lacking = lacking
        names = [each.partition("=") for each in params.split()]
        self._names = {name: in_query or name for name, _, in_query in names}

    def __call__(self, *values: Value, body: bytes | None = None, **named: Value) -> Request[T_co]:
        """Return the request. `parameters` says which values are left out. Raises TypeError: it has no such one."""
        if len(values) > len(self._names) or named.keys() - self._names.keys():
            raise TypeError(f"{self.path} has the parameters {', '.join(self._names)}")
        given = dict(zip(self._names, values, strict=False)) | named
        query = parameters({self._names[name]: value for name, value in given.items()})
        return Request(self.method, self.path, self._read, query, body, self._lacking)


def raw(body: bytes, decode: Decoder) -> bytes:
    """Read an answer as it is."""
    return body


def json_object(check: Callable[[Any], T]) -> Callable[[bytes, Decoder], T]:
    """Return how to read an answer in JSON, which `check` checks."""
    return lambda body, decode: check(decode(body))


def json_lines(check: Callable[[Any], T]) -> Callable[[bytes, Decoder], list[T]]:
    """Return how to read an answer with an object on each line."""
    return lambda body, decode: [check(decode(line)) for line in body.splitlines()]
