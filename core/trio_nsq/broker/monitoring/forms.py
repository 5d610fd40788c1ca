"""The two forms of a description for `/stats`: a dict, and JSON text, which takes a fraction of the time to make."""

from collections.abc import Mapping, Sequence
from functools import cache
from json.encoder import encode_basestring
from typing import Any, Protocol

from ...http import compact_json


class Form(Protocol):
    """Describes things. Each value is given as one of these methods returns it, or is an integer."""

    def text(self, value: str) -> Any: ...

    def boolean(self, value: bool) -> Any: ...

    def other(self, value: Any) -> Any:
        """Any value that JSON can have."""
        ...

    def listed(self, values: Sequence[Any] | None) -> Any:
        """A list of descriptions, or none."""
        ...

    def fields(self, values: Mapping[str, Any]) -> Any:
        """Fields with any values, for `describe`."""
        ...

    def describe(self, names: tuple[str, ...], values: tuple[Any, ...], more: Any = None) -> Any:
        """Describe an object: fields with their values, and further `fields`."""
        ...


class Dicts:
    """Describes things as dicts."""

    def text(self, value: str) -> str:
        return value

    def boolean(self, value: bool) -> bool:
        return value

    def other(self, value: Any) -> Any:
        return value

    def listed(self, values: Sequence[Any] | None) -> Sequence[Any] | None:
        return values

    def fields(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        return values

    def describe(
        self, names: tuple[str, ...], values: tuple[Any, ...], more: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        return {**dict(zip(names, values, strict=True)), **(more or {})}


class Texts:
    """Describes things as `compact_json` would encode their dicts."""

    text = staticmethod(encode_basestring)
    other = staticmethod(compact_json)

    def boolean(self, value: bool) -> str:
        return "true" if value else "false"

    def listed(self, values: Sequence[str] | None) -> str:
        return "null" if values is None else f"[{','.join(values)}]"

    def fields(self, values: Mapping[str, Any]) -> str:
        return compact_json(values)[1:-1]

    def describe(self, names: tuple[str, ...], values: tuple[Any, ...], more: str | None = None) -> str:
        text = _template(names) % values
        return f"{text},{more}}}" if more else f"{text}}}"


@cache
def _template(names: tuple[str, ...]) -> str:
    return "{" + ",".join([f'"{name}":%s' for name in names])
