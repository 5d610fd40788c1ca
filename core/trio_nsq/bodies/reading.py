"""Read bodies for people: decompress and decode them, and mask fields. Whatever a body is, the work is bounded.

What cannot be decoded stays as it is, with the reason; if fields are masked, only its size stays.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Protocol

from ..filters.conditions import parse_path
from ..filters.masks import BodyMasks, Mask
from ..platform.extras import install_hint
from ..protocol.errors import NSQError
from .compression import FIRST_BYTES, Compression, compression_of, decompress
from .errors import BodyError
from .json_of import plain_value, text_of_value

MAX_BYTES = 1024 * 1024
"""The most bytes of a decompressed body, and of a JSON body whose fields are masked."""
DECODED_BYTES = 256 * 1024
"""The most bytes of a body that is decoded: Python takes about a second for a worse one."""
FILE_S = 1.0
"""How long values of an Avro file are decoded, about: it has its own schema, for which each value may take long."""


class Format(StrEnum):
    """What a body is, after it is decompressed. `AUTO`: JSON, text, an Avro file, or bytes."""

    AUTO = "auto"
    AVRO = "avro"
    PROTOBUF = "protobuf"
    MESSAGEPACK = "messagepack"


class Decoder(Protocol):
    """Decodes bodies of one format.

    Attributes:
        format: Its name.
        names_fields: Whether fields have names; else they have numbers.
    """

    format: str
    names_fields: bool

    def value(self, body: bytes) -> Any:
        """Return the value of a body. Raises BodyError, RegistryError."""


@dataclass(frozen=True, slots=True)
class ReadBody:
    """A body as it is shown.

    Attributes:
        content: JSON of a decoded body, otherwise the bytes, or their beginning.
        is_complete: Whether the content is all of it.
        formats: What was undone, outermost first, such as `("gzip", "avro")`.
        problem: Why the body is not decoded; empty: it is, or need not be.
        is_masked: Whether fields may be masked.
    """

    content: bytes
    is_complete: bool = True
    formats: tuple[str, ...] = ()
    problem: str = ""
    is_masked: bool = False


ReadsBody = Callable[[bytes], ReadBody]
"""What reads the bodies of a list."""


class BodyReader:
    """Reads the bodies of some topics.

    Args:
        compression: How they are compressed.
        decoder: Decodes them; None: they are JSON, text, Avro files or bytes.
        masks: Fields and their masks, as of `BodyMasks`.
    """

    def __init__(
        self,
        compression: Compression = Compression.AUTO,
        decoder: Decoder | None = None,
        masks: Sequence[tuple[str, Mask]] = (),
    ) -> None:
        self._compression = compression
        self._decoder = decoder
        self.masks: tuple[tuple[str, Mask], ...] = tuple(masks)
        self._masks = BodyMasks(self.masks) if masks else None
        self._always_changes = bool(masks or decoder) or compression not in (
            Compression.AUTO,
            Compression.NONE,
        )

    @property
    def is_masked(self) -> bool:
        """Whether fields are masked."""
        return self._masks is not None

    @property
    def has_format(self) -> bool:
        """Whether bodies do not say themselves what they are."""
        return self._decoder is not None or self._compression is not Compression.AUTO

    @property
    def finds_masked(self) -> bool:
        """Whether the decoder gives fields the kind of names that the masks have."""
        if self._decoder is None or self._decoder.names_fields:
            return True
        return all(_is_number(part) for field, _ in self.masks for part in parse_path(field))

    @property
    def _masks_numbers(self) -> bool:
        return any(_is_number(parse_path(field)[0]) for field, _ in self.masks)

    def masked_also_by(self, masks: Sequence[tuple[str, Mask]]) -> "BodyReader":
        """Return a reader that masks more fields."""
        more = [each for each in masks if each not in self.masks]
        return BodyReader(self._compression, self._decoder, (*self.masks, *more)) if more else self

    def without_masks(self) -> "BodyReader":
        """Return a reader that masks nothing."""
        return BodyReader(self._compression, self._decoder)

    def changes(self, body: bytes) -> bool:
        """Whether a body may be shown as other bytes than its own. For most bodies, False is cheap."""
        if self._always_changes or body[:1] not in _FIRST:
            return self._always_changes
        is_compressed = self._compression is Compression.AUTO and compression_of(body) is not Compression.NONE
        return is_compressed or body.startswith(_AVRO_FILE)

    def content(self, body: bytes) -> bytes:
        """Return what a search looks at: the content of `read`."""
        return self.read(body).content if self.changes(body) else body

    def read(self, body: bytes) -> ReadBody:
        """Decompress, decode and mask a body. It does not raise."""
        if not body or not self.changes(body):
            return ReadBody(body)
        formats: tuple[str, ...] = ()
        data, is_complete = body, True
        try:
            compression = compression_of(body) if self._compression is Compression.AUTO else self._compression
            if compression is not Compression.NONE:
                data, is_complete = decompress(body, compression, MAX_BYTES)
                formats = (str(compression),)
            value, format_ = self._decoded(data, is_complete)
        except (NSQError, OSError) as exc:  # also of a registry that does not answer
            return self._undecoded(ReadBody(data, is_complete, formats, _sentence(exc)), len(body))
        if format_ is not None:
            return self._of_value(data, value, (*formats, str(format_)), len(body))
        if self._masks is None:
            return ReadBody(data, is_complete, formats)
        if not is_complete or len(data) > MAX_BYTES:
            return self._undecoded(ReadBody(b"", True, formats), len(body))
        masked = self._masks.masked_object(data)
        if masked is None:
            return self._undecoded(ReadBody(b"", True, formats), len(body))
        return ReadBody(masked, True, formats, is_masked=True)

    def unread(self, body: bytes) -> ReadBody:
        """Return a body for which there is no time."""
        return replace(self._undecoded(ReadBody(body), len(body)), problem=_NO_TIME)

    def _decoded(self, data: bytes, is_complete: bool) -> tuple[Any, str | None]:
        """Return the value of a decompressed body, and its format; None: it is not decoded. Raises as a decoder."""
        if self._decoder is None and not data.startswith(_AVRO_FILE):
            return None, None
        if not self.finds_masked:
            raise BodyError("it has no names of fields, so they cannot be masked")
        if not is_complete or len(data) > DECODED_BYTES:
            raise BodyError(f"it has more than {DECODED_BYTES // 1024} KiB, so it is not decoded")
        if data.startswith(_AVRO_FILE):
            if self._masks_numbers:
                raise BodyError(
                    "it has names of fields, and the masks have numbers, so they cannot be masked"
                )
            return _avro_file(data), "avro file"
        assert self._decoder is not None
        return self._decoder.value(data), self._decoder.format

    def _of_value(self, data: bytes, value: Any, formats: tuple[str, ...], size: int) -> ReadBody:
        try:
            plain = plain_value(value)
            if self._masks is not None:
                is_file = isinstance(plain, list)
                records = [self._masks.masked_value(each) for each in (plain if is_file else [plain])]
                plain = records if is_file else records[0]
            return ReadBody(text_of_value(plain), True, formats, is_masked=self.is_masked)
        except (NSQError, ValueError, RecursionError) as exc:
            return self._undecoded(ReadBody(data, True, formats[:-1], _sentence(exc)), size)

    def _undecoded(self, found: ReadBody, size: int) -> ReadBody:
        if self._masks is None:
            return found
        return replace(
            found,
            content=b"withheld: %d bytes" % size,
            is_complete=True,
            problem=_NOT_MASKED,  # the reason of a decoder may have values
            is_masked=True,
        )


PLAIN = BodyReader()
"""Reads bodies of which nothing is known."""
_AVRO_FILE = b"Obj\x01"
_FIRST = FIRST_BYTES + _AVRO_FILE[:1]
_MAX_RECORDS = 100
_NO_TIME = "It is not decoded in this list: open the message."
_NOT_MASKED = "It is no JSON object, or cannot be decoded, so its fields cannot be masked."
_MAX_VALUES = 200_000


def _avro_file(data: bytes) -> Iterator[Any]:
    """Return the records of a file. Each is decoded when it is read, so that the limits of `plain_value` are for all.

    Raises BodyError: the packages for it are not installed.
    """
    try:
        from .avro_container import decode_container
    except ModuleNotFoundError as exc:
        raise BodyError(
            f"an Avro file needs the extra 'schemas', which is not installed ({exc}): {install_hint('schemas')}"
        ) from exc
    return _first(decode_container(data, DECODED_BYTES, _MAX_VALUES, FILE_S))


def _first(values: Iterator[Any]) -> Iterator[Any]:
    for number, value in enumerate(values):
        if number == _MAX_RECORDS:
            yield {"": f"only the first {_MAX_RECORDS} records are shown"}
            return
        yield value


def _is_number(part: str) -> bool:
    """Whether a part of a mask is the number of a field, as decoded bodies have it."""
    return re.fullmatch("[1-9][0-9]*", part, re.ASCII) is not None


def _sentence(exc: Exception) -> str:
    text = " ".join(str(exc).split())[:300].rstrip(".") or type(exc).__name__
    return f"{text[:1].upper()}{text[1:]}."
