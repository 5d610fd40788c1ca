"""Topics whose messages are values of one type, and the codecs between these values and bytes.

A codec imports its library when it is created.
"""

import json
from dataclasses import dataclass
from inspect import isclass
from typing import Any, Generic, Protocol, TypeVar

from ..protocol.untrusted_json import decode_json
from .arguments import check_name
from .errors import DecodeFailed

T = TypeVar("T")


class Codec(Protocol[T]):
    """Makes bytes of values, and values of bytes. Any object with these methods is one."""

    def encode(self, value: T, /) -> bytes:
        """Return the body of a message. What it raises, publishing raises."""
        ...

    def decode(self, body: bytes, /) -> T:
        """Return the value of a message. Any `Exception` means that the body has none."""
        ...


@dataclass(frozen=True, slots=True)
class Topic(Generic[T]):
    """A topic whose messages are values of one type.

        orders = Topic("orders", Msgspec(Order))

        await producer.publish(orders, Order(...))

        order = orders.decode(message.body)

    Args:
        name: The name of the topic.
        codec: Encodes and decodes the values.

    Raises:
        TypeError, ValueError: The name is not that of a topic.
    """

    name: str
    codec: Codec[T]

    def __post_init__(self) -> None:
        check_name("topic", self.name)

    def encode(self, value: T) -> bytes:
        """Return the body of a message with this value. Raises the errors of the codec."""
        return self.codec.encode(value)

    def decode(self, body: bytes) -> T:
        """Return the value of a message.

        Raises:
            DecodeFailed: The body has no such value; the `__cause__` is the error of the codec.
        """
        try:
            return self.codec.decode(body)
        except Exception as error:
            raise DecodeFailed(self.name, str(error) or type(error).__name__) from error


def name_of(topic: "str | Topic[Any]") -> str:
    """Return the name of a topic, which may be given instead."""
    return topic.name if isinstance(topic, Topic) else topic


def encoded(topic: "str | Topic[Any]", body: Any) -> tuple[str, Any]:
    """Return the name of a topic, and the body of a message; with a name, the body is as it is given."""
    return (topic.name, topic.encode(body)) if isinstance(topic, Topic) else (topic, body)


class JSON:
    """Values that JSON has: dicts, lists, strings, numbers, True, False and None."""

    def encode(self, value: Any) -> bytes:
        """Return the value as JSON in UTF-8, without spaces. Raises TypeError, ValueError: JSON has no such value."""
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()

    def decode(self, body: bytes) -> Any:
        """Return the value. Raises ValueError: it is not JSON, or is nested too deeply."""
        return decode_json(body)


class Msgspec(Generic[T]):
    """Values of a type that msgspec knows, such as a `msgspec.Struct`, as JSON. Needs the package msgspec.

    Args:
        kind: The type.
    """

    def __init__(self, kind: type[T]) -> None:
        import msgspec

        self._kind = kind
        self._encoder = msgspec.json.Encoder()
        self._decoder = msgspec.json.Decoder(kind)

    def encode(self, value: T) -> bytes:
        """Return the value as JSON. Raises TypeError: it is not of this type, or cannot be encoded."""
        _check_kind(value, self._kind)
        return self._encoder.encode(value)

    def decode(self, body: bytes) -> T:
        """Return the value. Raises msgspec.DecodeError: it is not JSON, or not of this type."""
        return self._decoder.decode(body)


class Pydantic(Generic[T]):
    """Values of a type that pydantic knows, such as a `pydantic.BaseModel`, as JSON. Needs the package pydantic.

    Args:
        kind: The type.
    """

    def __init__(self, kind: type[T]) -> None:
        from pydantic import TypeAdapter

        self._kind = kind
        self._adapter: TypeAdapter[T] = TypeAdapter(kind)

    def encode(self, value: T) -> bytes:
        """Return the value as JSON, with the aliases of its fields. Raises TypeError: it is not of this type."""
        _check_kind(value, self._kind)
        return self._adapter.dump_json(value, by_alias=True)

    def decode(self, body: bytes) -> T:
        """Return the value. Raises pydantic.ValidationError: it is not JSON, or not of this type."""
        return self._adapter.validate_json(body)


_RECORDS = ("__struct_fields__", "model_fields", "__dataclass_fields__", "__attrs_attrs__")
"""Attributes of classes for records: of msgspec, pydantic, dataclasses and attrs."""


def _check_kind(value: object, kind: object) -> None:
    """Refuse a value that is not a record of this class: encoded, nothing could decode it. Raises TypeError.

    Other types, such as `list[Order]`, are not checked.
    """
    if isclass(kind) and any(hasattr(kind, name) for name in _RECORDS) and not isinstance(value, kind):
        raise TypeError(f"the message must be of type {kind.__name__}, not {type(value).__name__}")
