"""Headers of messages: names and values beside the body, as the wire and the log have them.

The headers of a message are a text of lines, `name:value\\n` each, in UTF-8; a message without headers has an empty
text. Names are lower case, as HTTP/2 has them, because proxies and libraries change the case of names. In HPUB, and in
the frames for clients that asked for headers, the text is before the body:

     0              2              2+size
    +--------------+--------------+------- - -
    |  size        |  text        |  body
    +--------------+--------------+------- - -
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from struct import Struct
from typing import Any, Final, TypeAlias

from .errors import CommandError
from .messages import MessageSet, pack_messages

Headers: TypeAlias = Mapping[str, str]
"""The headers of a message: values by names."""

MAX_HEADERS: Final = 64
"""The most headers of a message."""
MAX_HEADERS_BYTES: Final = 16 * 1024
"""The most bytes of the text: names and values, and two bytes for each header."""
MAX_HEADER_NAME_BYTES: Final = 128
MAX_HPUB_MESSAGES: Final = 1024
"""The most messages of one HPUB: each costs the broker 5 us, in one turn of its event loop."""
MAX_HPUB_HEADERS_BYTES: Final = 1024 * 1024
"""The most bytes of headers in one HPUB, for the same reason: they take 7 ms."""
SIZE_BYTES: Final = 2
MAX_PREFIX_BYTES: Final = SIZE_BYTES + MAX_HEADERS_BYTES
"""How much longer a message is with its headers, at most."""

_SIZE: Final = Struct(">H")
_TOKEN: Final = r"[a-z0-9!#$%&'*+.^_`|~-]{1,128}"  # RFC 9110, in lower case
_NAME: Final = re.compile(_TOKEN)
_TEXT: Final = re.compile(rb"(?:%s:[^\x00-\x1f\x7f]*+\n)*+" % _TOKEN.encode())
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")


def encode_headers(headers: Headers) -> str:
    """Return the text of headers.

    Raises:
        TypeError: These are not names and values, both strings.
        ValueError: A name or a value is invalid, or these are too many, or too long together.
    """
    if not isinstance(headers, Mapping):
        raise TypeError(f"headers must be a mapping of names to values, not {type(headers).__name__}")
    for name, value in headers.items():
        _check_header(name, value)
    text = "".join([f"{name}:{value}\n" for name, value in headers.items()])
    check_size(len(headers), len(text.encode()))
    return text


def encode_headers_of_all(headers: Headers | Sequence[Headers] | None, count: int) -> Sequence[str]:
    """Return the text of the headers of each of several messages; empty if none has headers.

    Args:
        headers: Those of all messages, or those of each.
        count: The number of messages.

    Raises:
        TypeError, ValueError: See `encode_headers`; or there are not as many headers as messages.
    """
    if headers is None:
        return ()
    if isinstance(headers, Mapping):
        texts = [encode_headers(headers)] * count
    elif isinstance(headers, list | tuple):
        texts = [encode_headers(each) for each in headers]
    else:
        raise TypeError(
            f"headers must be a mapping, or a list with a mapping for each message, not {type(headers).__name__}"
        )
    if len(texts) != count:
        raise ValueError(f"headers for {len(texts)} messages, but there are {count}")
    return texts if any(texts) else ()


def check_hpub(texts: Sequence[str]) -> None:
    """Raise ValueError if one HPUB must not have messages with these headers."""
    if len(texts) > MAX_HPUB_MESSAGES:
        raise ValueError(
            f"{len(texts)} messages with headers; a batch must not have more than {MAX_HPUB_MESSAGES}"
        )
    size = sum(len(text.encode()) for text in texts)
    if size > MAX_HPUB_HEADERS_BYTES:
        raise ValueError(f"headers of {size} bytes; a batch must not have more than {MAX_HPUB_HEADERS_BYTES}")


def _check_header(name: object, value: object) -> None:
    if not isinstance(name, str):
        raise TypeError(f"the name of a header must be a string, not {type(name).__name__}")
    if not isinstance(value, str):
        raise TypeError(f"the value of header {name!r} must be a string, not {type(value).__name__}")
    if _NAME.fullmatch(name) is None:
        if _NAME.fullmatch(name.lower()) is not None:
            raise ValueError(f"the name of header {name!r} has upper-case letters: use {name.lower()!r}")
        raise ValueError(
            f"the name of header {name[:64]!r} is not valid: use 1 to {MAX_HEADER_NAME_BYTES} of a-z 0-9 - _ . "
            "and !#$%&'*+^`|~"
        )
    if _CONTROL.search(value) is not None:
        raise ValueError(
            f"the value of header {name!r} has a control character: encode it, for example as base64"
        )
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"the value of header {name!r} cannot be encoded as UTF-8") from None


def is_header_name(name: str) -> bool:
    """Whether a header can have this name."""
    return _NAME.fullmatch(name) is not None


def check_size(count: int, size: int) -> None:
    """Raise ValueError if a message must not have so many headers, or so many bytes of them."""
    if count > MAX_HEADERS:
        raise ValueError(f"{count} headers, more than {MAX_HEADERS}")
    if size > MAX_HEADERS_BYTES:
        raise ValueError(f"headers of {size} bytes, more than {MAX_HEADERS_BYTES}")


def decode_headers(text: str) -> dict[str, str]:
    """Return the headers in a valid text, in order."""
    headers: dict[str, str] = {}
    for line in text.split("\n")[:-1]:
        name, _, value = line.partition(":")
        headers[name] = value
    return headers


def checked_text(data: bytes) -> str:
    """Return the text that another program has encoded. Raises ValueError if it is not one."""
    check_size(data.count(b"\n"), len(data))
    if _TEXT.fullmatch(data) is None:
        raise ValueError("invalid headers")
    text = data.decode()
    if len(decode_headers(text)) != text.count("\n"):
        raise ValueError("a header occurs twice")
    return text


def is_text(value: Any) -> bool:
    """Whether a value of a decoded JSON document is the text of headers."""
    try:
        return isinstance(value, str) and checked_text(value.encode()) == value
    except ValueError:
        return False


def split_prefix(data: bytes, start: int, end: int) -> tuple[bytes, int]:
    """Return the encoded text of a message with headers, and the offset of its body.

    Args:
        data: The message is `data[start:end]`.

    Raises:
        ValueError: There is no complete text.
    """
    if end - start < SIZE_BYTES:
        raise ValueError("incomplete headers")
    (size,) = _SIZE.unpack_from(data, start)
    body = start + SIZE_BYTES + size
    if body > end:
        raise ValueError("incomplete headers")
    return data[start + SIZE_BYTES : body], body


def prefix_of(text: str) -> bytes:
    """Return what precedes the body of a message with these headers."""
    encoded = text.encode()
    return _SIZE.pack(len(encoded)) + encoded


def headers_bytes(headers: Headers) -> int:
    """Return the size of the text of valid headers."""
    return sum(len(name) + len(value.encode()) + 2 for name, value in headers.items())


def prefix_bytes(text: str) -> int:
    """Return the size of `prefix_of`."""
    return SIZE_BYTES + len(text.encode())


def with_prefixes(bodies: Iterable[bytes], texts: Iterable[str]) -> MessageSet:
    """Return the messages of an HPUB: each body after the text of its headers. Raises as `pack_messages`."""
    return pack_messages([prefix_of(text) + body for body, text in zip(bodies, texts, strict=True)])


def split_for_hpub(bodies: Sequence[bytes], texts: Sequence[str], max_bytes: int) -> Iterator[MessageSet]:
    """Split messages with headers into the messages of HPUBs of at most `max_bytes` each.

    A larger message is one by itself. Raises as `pack_messages`.
    """
    part: list[bytes] = []
    size = headers_bytes = 0
    for body, text in zip(bodies, texts, strict=True):
        prefix = prefix_of(text)
        more = 4 + len(prefix) + len(body)
        if part and (
            size + more > max_bytes
            or len(part) == MAX_HPUB_MESSAGES
            or headers_bytes + len(prefix) > MAX_HPUB_HEADERS_BYTES
        ):
            yield pack_messages(part)
            part, size, headers_bytes = [], 0, 0
        part.append(prefix + body)
        size += more
        headers_bytes += len(prefix)
    if part:
        yield pack_messages(part)


def split_prefixes(messages: MessageSet, max_msg_size: int) -> tuple[MessageSet, Sequence[str]]:
    """Split the messages of an HPUB into their bodies, and the text of the headers of each.

    Raises:
        CommandError: `E_BAD_MESSAGE` or `E_BAD_HEADERS`, for the first message that is not valid.
    """
    data, start = messages.data, 4
    bodies: list[bytes] = []
    texts: list[str] = []
    left = MAX_HPUB_HEADERS_BYTES
    known: dict[bytes, str] = {}  # most messages of a command have the same headers, or similar ones
    for number, size in enumerate(messages.sizes):
        try:
            encoded, body = split_prefix(data, start, start + size)
            left -= len(encoded)
            if left < 0:
                raise ValueError(f"more than {MAX_HPUB_HEADERS_BYTES} bytes of headers in all")
            text = known.get(encoded)
            if text is None:
                text = known[encoded] = checked_text(encoded)
        except ValueError as exc:
            raise CommandError("E_BAD_HEADERS", f"HPUB message({number}): {exc}") from None
        length = start + size - body
        if not 0 < length <= max_msg_size:
            what = f"too big {length} > {max_msg_size}" if length else "without a body"
            raise CommandError("E_BAD_MESSAGE", f"HPUB message({number}) {what}")
        bodies.append(data[body : start + size])
        texts.append(text)
        start += size + 4
    return pack_messages(bodies), texts
