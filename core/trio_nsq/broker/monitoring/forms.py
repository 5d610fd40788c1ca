"""The two forms of a description for `/stats`: a dict, and JSON text, which takes a fraction of the time to make."""

from collections.abc import Mapping, Sequence
from json.encoder import encode_basestring
from typing import Any

from ...http.messages import compact_json

Layout = Mapping[str, type]
"""The names of an object's fields, in their order, with the types of their values."""


class Form:
    """Describes things. Each value is given as one of these methods returns it, or is an integer."""

    def text(self, value: str) -> Any:
        raise NotImplementedError

    def boolean(self, value: bool) -> Any:
        raise NotImplementedError

    def optional(self, value: int | None) -> Any:
        """An integer, or none."""
        raise NotImplementedError

    def other(self, value: Any) -> Any:
        """Any value that JSON can have."""
        raise NotImplementedError

    def listed(self, values: Sequence[Any] | None) -> Any:
        """A list of descriptions, or none."""
        raise NotImplementedError

    def together(self, values: list[Any]) -> list[Any]:
        """Join some descriptions of a list, at least one, if that is possible, for `listed`."""
        raise NotImplementedError

    def fields(self, values: Mapping[str, Any]) -> Any:
        """Fields with any values, at least one, for `describe`."""
        raise NotImplementedError

    def joined(self, fields: Any, more: Any) -> Any:
        """The fields of both, for `describe`."""
        raise NotImplementedError

    def with_list(self, before: Any, name: str, values: Sequence[Any], after: Any) -> Any:
        """A field with a list of descriptions, between other fields, for `describe`."""
        raise NotImplementedError

    def prepared(self, layout: Layout) -> Any:
        """Prepare a layout for `describe`."""
        raise NotImplementedError

    def describe(self, prepared: Any, values: tuple[Any, ...], more: Any = None, *, first: Any = None) -> Any:
        """Describe an object: the values of a layout that is `prepared`, and fields after and before them."""
        raise NotImplementedError


class Dicts(Form):
    """Describes things as dicts."""

    def text(self, value: str) -> Any:
        return value

    def boolean(self, value: bool) -> Any:
        return value

    def optional(self, value: int | None) -> Any:
        return value

    def other(self, value: Any) -> Any:
        return value

    def listed(self, values: Sequence[Any] | None) -> Any:
        return values

    def together(self, values: list[Any]) -> list[Any]:
        return values

    def fields(self, values: Mapping[str, Any]) -> Any:
        return values

    def joined(self, fields: Any, more: Any) -> Any:
        return {**fields, **more}

    def with_list(self, before: Any, name: str, values: Sequence[Any], after: Any) -> Any:
        return {**before, name: values, **after}

    def prepared(self, layout: Layout) -> Any:
        return tuple(layout)

    def describe(self, prepared: Any, values: tuple[Any, ...], more: Any = None, *, first: Any = None) -> Any:
        described = dict(zip(prepared, values, strict=True))
        return {**(first or {}), **described, **(more or {})}


class Texts(Form):
    """Describes things as `compact_json` would encode their dicts."""

    def text(self, value: str) -> Any:
        return encode_basestring(value)

    def boolean(self, value: bool) -> Any:
        return "true" if value else "false"

    def optional(self, value: int | None) -> Any:
        return "null" if value is None else value

    def other(self, value: Any) -> Any:
        return compact_json(value)

    def listed(self, values: Sequence[Any] | None) -> Any:
        return "null" if values is None else f"[{','.join(values)}]"

    def together(self, values: list[Any]) -> list[Any]:
        return [",".join(values)]

    def fields(self, values: Mapping[str, Any]) -> Any:
        return compact_json(values)[1:-1]

    def joined(self, fields: Any, more: Any) -> Any:
        return f"{fields},{more}"

    def with_list(self, before: Any, name: str, values: Sequence[Any], after: Any) -> Any:
        return f'{before},"{name}":[{",".join(values)}],{after}'

    def prepared(self, layout: Layout) -> Any:
        # %d takes less time than %s, which makes a text of the integer first.
        return ",".join([f'"{name}":{"%d" if kind is int else "%s"}' for name, kind in layout.items()])

    def describe(self, prepared: Any, values: tuple[Any, ...], more: Any = None, *, first: Any = None) -> Any:
        template: str = prepared
        text = template % values
        if first is not None:
            return f"{{{first},{text},{more}}}" if more is not None else f"{{{first},{text}}}"
        return f"{{{text},{more}}}" if more is not None else f"{{{text}}}"
