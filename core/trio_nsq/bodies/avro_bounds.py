"""Bounds for the work that one Avro body can cause, whatever its bytes are.

fastavro's compiled reader recurses in C without a limit, and reads as many items as the body says, also those that take
no bytes. It is safe for most schemas: each value takes a byte, and records are nested as deep as the schema says. For
the others there is fastavro's Python reader, which is ten times slower, with a decoder that counts.
"""

import io
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from fastavro import _read_py
from fastavro.io.binary_decoder import BinaryDecoder

MAX_TYPES = 10_000
"""How many types a schema may have, with those of each place where a named type is used."""
MAX_BRANCHES = 1000
"""How many types a union may have: for each value, fastavro compares all of them with each other."""
MAX_VALUES = 20_000_000
"""How many values that take no bytes a body may have."""
_MAX_DEPTH = 100
_FREE_ITEMS = 1000
"""How many items a body may have in addition to its number of bytes."""
_MAX_VARINT_BYTES = 10
_read_data: Any = _read_py.read_data


class Bounds(NamedTuple):
    """What a schema allows a body to be.

    Attributes:
        is_flat: Whether types are nested up to a limit, and all items of arrays take bytes.
        free: The greatest number of values without bytes in an item or in a branch of a union.
        defaults: The greatest number of fields with a default in a record.
    """

    is_flat: bool
    free: int
    defaults: int


class _Part(NamedTuple):
    """The size of a type: of all types in it, and of the values that take no bytes."""

    types: int
    depth: int
    free: int
    takes_bytes: bool


def bounds_of(schema: object, named: Mapping[str, Any]) -> Bounds:
    """Measure a schema.

    Args:
        schema: The schema as fastavro has parsed it.
        named: The schemas of its named types.

    Raises:
        ValueError: It, or a union in it, has too many types.
        RecursionError: It is nested too deep.
    """
    walk = _Walk(named)
    depth = walk.part(schema).depth
    return Bounds(walk.is_flat and depth <= _MAX_DEPTH, max(1, walk.free), walk.defaults)


class _Walk:
    """Measures the types of a schema, each named type once."""

    def __init__(self, named: Mapping[str, Any]) -> None:
        self._named = named
        self._known: dict[str, _Part | None] = {}  # None: it is being measured
        self.is_flat, self.free, self.defaults = True, 0, 0

    def part(self, schema: Any) -> _Part:
        found = self._part(schema)
        if found.types > MAX_TYPES:
            raise ValueError(
                f"it has more than {MAX_TYPES} types, with those of each place where a named type is used"
            )
        return found

    def _part(self, schema: Any) -> _Part:
        if isinstance(schema, list):
            if len(schema) > MAX_BRANCHES:
                raise ValueError(f"it has a union of more than {MAX_BRANCHES} types")
            return self._repeated(*schema)
        if isinstance(schema, str):
            return self._reference(schema)
        match schema["type"]:
            case "array":
                return self._repeated(schema["items"], is_array=True)
            case "map":
                return self._repeated(schema["values"])
            case "record" | "error":
                return self._record(schema)
            case "fixed":
                return _Part(1, 1, not schema["size"], bool(schema["size"]))
            case "enum":
                return _Part(1, 1, 0, True)
            case inner:
                return self.part(inner)

    def _repeated(self, *schemas: Any, is_array: bool = False) -> _Part:
        """Measure what takes a byte for each of its values, or, as an array, has values that should."""
        parts = [self.part(each) for each in schemas]
        self.free = max(self.free, *(each.free for each in parts), 0)
        if is_array and not all(each.takes_bytes for each in parts):
            self.is_flat = False
        depth = max((each.depth for each in parts), default=0)
        return _Part(1 + sum(each.types for each in parts), 1 + depth, 0, True)

    def _reference(self, name: str) -> _Part:
        if name not in self._named:
            return _Part(1, 1, name == "null", name != "null")
        if name not in self._known:
            return self.part(self._named[name])
        if (known := self._known[name]) is None:
            self.is_flat = False  # a record inside of itself
            return _Part(1, 1, 1, True)
        return known

    def _record(self, schema: Mapping[str, Any]) -> _Part:
        name, fields = schema["name"], schema["fields"]
        if known := self._known.get(name):
            return known
        self._known[name] = None
        parts = [self.part(field["type"]) for field in fields]
        self.defaults = max(self.defaults, sum("default" in field for field in fields))
        found = self._known[name] = _Part(
            1 + sum(each.types for each in parts),
            1 + max((each.depth for each in parts), default=0),
            1 + sum(each.free for each in parts),
            any(each.takes_bytes for each in parts),
        )
        return found


def read_bounded(
    stream: io.BytesIO,
    size: int,
    free: int,
    writer: object,
    reader: object,
    named: Mapping[str, Mapping[str, Any]],
    max_values: int = MAX_VALUES,
) -> Any:
    """Read a value of any schema.

    Args:
        size: The number of bytes of the body.
        free: How many values an item or a branch of a union has that take no bytes.
        reader: The schema of the value; None: the writer's.
        named: The schemas of the named types of `writer` and `reader`.
        max_values: How many values that take no bytes the body may have.

    Raises:
        ValueError: The body has too many items.
        RecursionError: Its values are nested too deep.
    """
    return _read_data(_BoundedDecoder(stream, size, free, max_values), writer, named, reader)


class _BoundedDecoder(BinaryDecoder):
    """Counts the items of a body."""

    def __init__(self, stream: io.BytesIO, size: int, free: int, max_values: int) -> None:
        super().__init__(stream)  # type: ignore[no-untyped-call]  # of fastavro
        self._items_left = min(size + _FREE_ITEMS, max_values // max(free, 1))

    def read_long(self) -> int:
        found: int = 0
        for shift in range(_MAX_VARINT_BYTES):
            byte: bytes = self.fo.read(1)
            if not byte:
                raise EOFError("the body ends in a number")
            found |= (byte[0] & 0x7F) << 7 * shift
            if byte[0] < 0x80:
                return (found >> 1) ^ -(found & 1)
        raise ValueError("a number has more than 64 bits")

    read_int = read_long

    def read_index(self) -> int:
        self._take()
        return self.read_long()

    def _iter_items(self) -> Iterator[None]:
        for _ in super()._iter_array_or_map():  # type: ignore[no-untyped-call]  # of fastavro
            self._take()
            yield

    iter_array = _iter_items
    iter_map = _iter_items

    def _take(self) -> None:
        self._items_left -= 1
        if self._items_left < 0:
            raise ValueError("it has too many items for its size")
