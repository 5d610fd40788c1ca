"""Makes batches of JSON objects, one on each line, as `tail --format json` writes them."""

import binascii
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from trio_nsq.protocol import is_valid_name
from trio_nsq.protocol.batcher import MAX_BATCH_BYTES
from trio_nsq.protocol.headers import (
    MAX_HPUB_HEADERS_BYTES,
    MAX_HPUB_MESSAGES,
    Headers,
    encode_headers,
    prefix_bytes,
)

from ...framework.output import print_diagnostic
from .batches import Batch, BatchSource
from .input import Splitter
from .keys import key_of

MAX_WARNINGS = 10
"""Later bad lines are only counted."""

_LONGEST_ESCAPE = 6  # \u0000 is one byte of a body
_OTHER_FIELDS_BYTES = 64 * 1024
_MAX_DIGITS = 4300
"""Python converts no longer integers."""
_decode = json.JSONDecoder().raw_decode
_BOM = "\N{BYTE ORDER MARK}"
"""Programs of other systems write it at the beginning of a file."""


def _long_integer(digits: str) -> float:
    return int(digits) if len(digits) <= _MAX_DIGITS else float(digits)


_decode_long_integers = json.JSONDecoder(parse_int=_long_integer).raw_decode
"""Takes twice the time."""


class BadLine(ValueError):
    """A line is not a record; the message is the reason."""


class Record(NamedTuple):
    """A message with its topic and delay; see `Batch`. `headers_bytes` is 0 without headers."""

    topic: str
    body: bytes
    defer_ms: int
    due_ns: int
    key: bytes | None
    headers: Headers
    headers_bytes: int


class RecordParser:
    """Parses lines.

    Args:
        topic: The topic of all messages; None: that of each record.
        defer_ms: The delay of all messages; None: that of each record.
        max_msg_size: The maximum size of a body.
        key_field: The path of the field with the key; empty: none.
        headers: Headers of all messages, instead of those with the same names of a record.
    """

    def __init__(
        self,
        topic: str | None,
        defer_ms: int | None,
        max_msg_size: int,
        key_field: Sequence[str] = (),
        headers: Headers | None = None,
    ) -> None:
        self._headers = headers or {}
        self._key_field = key_field
        self._topic = topic
        self._defer_ms = defer_ms
        self._max_msg_size = max_msg_size
        self._valid: set[str] = set()

    def parse(self, line: bytes, now_ns: int) -> Record | None:
        """Return the record of a line; None: the line is blank. Raises BadLine.

        Args:
            now_ns: The time; a message that is due by then is not deferred.
        """
        try:
            text = line.decode().strip().removeprefix(_BOM).lstrip()
            if not text:
                return None
            try:
                fields, end = _decode(text)
            except json.JSONDecodeError:
                raise
            except ValueError:
                fields, end = _decode_long_integers(text)
        except UnicodeDecodeError:
            raise BadLine("not UTF-8") from None
        except json.JSONDecodeError as error:
            hint = ""
            if error.pos >= len(text):  # as if more lines belonged to it
                hint = ". Each line is an object: 'jq -c .' writes indented JSON so"
            raise BadLine(f"not JSON: {error.msg} (column {error.colno}){hint}") from None
        except RecursionError:
            raise BadLine("arrays or objects are nested too deeply") from None
        if end != len(text):
            raise BadLine(f"not JSON: more text follows the value (column {end + 1})")
        if not isinstance(fields, dict):
            raise BadLine("not a JSON object")
        body = _body(fields)
        if len(body) > self._max_msg_size:
            raise BadLine(f"the body is longer than {self._max_msg_size} bytes: see --max-msg-size")
        topic = self._topic
        if topic is None:
            topic = self._topic_of(fields)
        key = key_of(fields, self._key_field) if self._key_field else None
        headers, headers_bytes = self._headers_of(fields)
        if self._defer_ms is not None:
            return Record(topic, body, self._defer_ms, 0, key, headers, headers_bytes)
        defer_ms, due_ns = _number(fields, "defer_ms"), _number(fields, "due_ns")
        due_ns = 0 if defer_ms or due_ns <= now_ns else due_ns
        return Record(topic, body, defer_ms, due_ns, key, headers, headers_bytes)

    def _headers_of(self, fields: dict[str, Any]) -> tuple[Headers, int]:
        headers = fields.get("headers") or {}
        if not isinstance(headers, Mapping):
            raise BadLine('"headers" is not an object of names and values')
        headers = {**headers, **self._headers}
        if not headers:
            return headers, 0
        try:
            return headers, prefix_bytes(encode_headers(headers))
        except (TypeError, ValueError) as error:
            raise BadLine(str(error)) from None

    def _topic_of(self, fields: dict[str, Any]) -> str:
        topic = fields.get("topic")
        if topic is None:
            raise BadLine('no "topic": name one for all records, qcli pub TOPIC')
        if not isinstance(topic, str) or (topic not in self._valid and not is_valid_name(topic)):
            raise BadLine(f'"topic" is not a topic name: {json.dumps(topic)}')
        self._valid.add(topic)
        return topic


def _body(fields: dict[str, Any]) -> bytes:
    body, encoded = fields.get("body"), fields.get("body_base64")
    if (body is None) == (encoded is None):
        raise BadLine('both "body" and "body_base64"' if body else 'neither "body" nor "body_base64"')
    if not isinstance(text := encoded if body is None else body, str):
        raise BadLine(f'"{"body" if encoded is None else "body_base64"}" is not a string')
    try:
        return text.encode() if encoded is None else binascii.a2b_base64(text, strict_mode=True)
    except UnicodeEncodeError:
        raise BadLine('"body" has half of a surrogate pair, which is not a character') from None
    except ValueError as error:
        raise BadLine(f'"body_base64" is not base64: {error}') from None


def _number(fields: dict[str, Any], name: str) -> int:
    """Return an integer that is not negative; 0: there is none, or null."""
    value = fields.get(name)
    if value is None:
        return 0
    if type(value) is not int or value < 0:
        raise BadLine(f'"{name}" is not an integer of 0 or more')
    return value


@dataclass(slots=True)
class _Run:
    """Consecutive messages of a topic with the same delay."""

    first: Record
    bodies: list[bytes] = field(default_factory=list)
    keys: list[bytes | None] = field(default_factory=list)
    headers: list[Headers] = field(default_factory=list)
    body_bytes: int = 0
    headers_bytes: int = 0

    def batch(self) -> Batch:
        first, headers = self.first, self.headers if self.headers_bytes else ()
        return Batch(first.topic, self.bodies, first.defer_ms, first.due_ns, self.keys, headers)

    def is_full_for(self, record: Record) -> bool:
        """Return whether the message of a record exceeds the limits of a batch."""
        headers_bytes = self.headers_bytes + record.headers_bytes
        return self.body_bytes + len(record.body) > MAX_BATCH_BYTES or (
            headers_bytes > 0
            and (headers_bytes > MAX_HPUB_HEADERS_BYTES or len(self.bodies) >= MAX_HPUB_MESSAGES)
        )


class Records(BatchSource):
    """Makes batches of records. The messages of each topic keep their order.

    Args:
        batch_size: The most messages in a batch.
        skip_bad: Skip lines that are not records, with a warning. False: such a line is an error.
    """

    def __init__(self, parser: RecordParser, max_msg_size: int, batch_size: int, *, skip_bad: bool) -> None:
        most = max_msg_size * _LONGEST_ESCAPE + _OTHER_FIELDS_BYTES
        super().__init__(Splitter(b"\n", most))
        self._parser = parser
        self._batch_size = batch_size
        self._skip_bad = skip_bad
        self._line = 0  # the number of the last line of this input
        self._runs: dict[str, _Run] = {}  # by topic

    def __len__(self) -> int:
        return sum(len(run.bodies) for run in self._runs.values())

    def begin(self, name: str) -> None:
        super().begin(name)
        self._line = 0

    def rest(self) -> Iterator[Batch]:
        runs = list(self._runs.values())
        self._runs.clear()
        for run in runs:
            yield run.batch()

    def _batches(self, lines: list[bytes]) -> Iterator[Batch]:
        parse, runs, now_ns = self._parser.parse, self._runs, time.time_ns()
        for line in lines:
            self._line += 1
            try:
                record = parse(line, now_ns)
            except BadLine as error:
                self._report(error)
                if self.error is not None:
                    return
                continue
            if record is None:
                continue
            body = record.body
            if not body:
                self.empty += 1
                continue
            run = runs.get(record.topic)
            if run is not None and (
                run.first.due_ns != record.due_ns
                or run.first.defer_ms != record.defer_ms
                or run.is_full_for(record)
                or len(run.bodies) == self._batch_size
            ):
                yield run.batch()
                run = None
            if run is None:
                run = runs[record.topic] = _Run(record)
            run.bodies.append(body)
            run.keys.append(record.key)
            run.headers.append(record.headers)
            run.headers_bytes += record.headers_bytes
            run.body_bytes += len(body)
        if self._splitter.too_long is not None:
            self.error = (
                f"Line {self._line + 1} of {self._name} is longer than {self._splitter.max_bytes} bytes."
            )

    def _report(self, error: BadLine) -> None:
        """Report a bad line: as an error, or, if bad lines are skipped, as a warning."""
        if not self._skip_bad:
            self.error = (
                f"Line {self._line} of {self._name}: {error}. Nothing after it was published. Correct the line, or "
                "skip such lines with --skip-bad."
            )
            return
        self.skipped += 1
        if self.skipped <= MAX_WARNINGS:
            print_diagnostic(f"Warning: line {self._line} of {self._name} skipped: {error}.")
        if self.skipped == MAX_WARNINGS:
            print_diagnostic("Warning: more bad lines are skipped without a warning, and counted.")
