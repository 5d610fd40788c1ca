"""The fields of a Protobuf message without its schema, by number, as `protoc --decode_raw` shows them.

The wire format does not tell a message from a string, nor a negative number from a large one: what can be a message
is shown as one, then what can be text as text, and all else as bytes.
"""

from typing import Any

from .errors import BodyError

_MAX_DEPTH = 10
_MAX_FIELD = 2**29 - 1


def decode_fields(body: bytes) -> dict[str, Any]:
    """Return the fields of a message by number; a field that is there several times is a list. Raises BodyError."""
    found = _message(body, 0)
    if found is None:
        raise BodyError("the body is no Protobuf message")
    return found


def _message(data: bytes, depth: int) -> dict[str, Any] | None:
    """Return the fields of a message; None: it is none."""
    fields: dict[str, list[Any]] = {}
    at = 0
    while at < len(data):
        key = _varint(data, at)
        if key is None or not 1 <= key[0] >> 3 <= _MAX_FIELD:
            return None
        kind, at = key[0] & 7, key[1]
        value: Any
        if kind == 0:
            number = _varint(data, at)
            if number is None:
                return None
            value, at = number
        elif kind in (1, 5):
            end = at + (8 if kind == 1 else 4)
            if end > len(data):
                return None
            value, at = int.from_bytes(data[at:end], "little"), end
        elif kind == 2:
            size = _varint(data, at)
            if size is None or size[1] + size[0] > len(data):
                return None
            value, at = _value(data[size[1] : size[1] + size[0]], depth), size[1] + size[0]
        else:  # groups are older than Protobuf 2
            return None
        fields.setdefault(str(key[0] >> 3), []).append(value)
    return {name: values[0] if len(values) == 1 else values for name, values in fields.items()}


def _value(data: bytes, depth: int) -> Any:
    if data and depth < _MAX_DEPTH and (message := _message(data, depth + 1)) is not None:
        return message
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return data
    return text if text.replace("\n", "").replace("\t", "").isprintable() else data


def _varint(data: bytes, at: int) -> tuple[int, int] | None:
    """Return a number, and the index after it; None: there is none."""
    found = 0
    for shift, byte in enumerate(data[at : at + 10]):
        found |= (byte & 0x7F) << 7 * shift
        if byte < 0x80:
            return found, at + shift + 1
    return None
