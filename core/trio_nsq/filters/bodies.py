"""Apply all filters to message bodies."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from .conditions import Condition
from .fields import FieldList
from .json_text import NotJSON, body_of, text_of, whole_object


class OtherBodies(StrEnum):
    """What to do with bodies that are not JSON objects, if a filter needs one."""

    DEAD_LETTER = "dead-letter"
    PASS = "pass"
    DROP = "drop"


class Pattern(Protocol):
    """A compiled regular expression for bytes."""

    def search(self, text: bytes) -> object | None:
        """Return a match anywhere in a text, or None."""
        ...


@dataclass(slots=True)
class Filtered:
    """The result for some bodies.

    Attributes:
        passed: The bodies that pass, in order, reduced to the fields.
        kept: Their indexes.
        not_json: The indexes of bodies that are not JSON objects, with any `OtherBodies`.
        dropped: The number of bodies that do not match.
    """

    passed: list[bytes] = field(default_factory=list)
    kept: Sequence[int] = ()
    not_json: list[int] = field(default_factory=list)
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class Filter:
    """A message passes if its body meets all of these.

    Attributes:
        pattern: The body contains a match.
        conditions: The body is a JSON object that meets all of them.
        fields: The body is reduced to these.
        others: What to do with bodies that are not JSON objects.
    """

    pattern: Pattern | None = None
    conditions: Sequence[Condition] = ()
    fields: FieldList | None = None
    others: OtherBodies = OtherBodies.DEAD_LETTER

    @property
    def needs_json(self) -> bool:
        """Whether it reads bodies as JSON."""
        return bool(self.conditions) or self.fields is not None

    @property
    def passes_all(self) -> bool:
        """Whether all bodies pass unchanged."""
        return self.pattern is None and not self.needs_json

    def apply(self, bodies: Sequence[bytes]) -> Filtered:
        """Filter bodies. It takes some microseconds for each."""
        if self.passes_all:
            return Filtered(list(bodies), range(len(bodies)))
        result = Filtered()
        search = self.pattern.search if self.pattern is not None else None
        needs_json, passed = self.needs_json, result.passed
        result.kept = kept = list[int]()
        for index, body in enumerate(bodies):
            if search is not None and search(body) is None:
                result.dropped += 1
                continue
            if needs_json:
                try:
                    selected = self._select(body)
                except NotJSON:
                    result.not_json.append(index)
                    if self.others is OtherBodies.PASS:
                        passed.append(body)
                        kept.append(index)
                    continue
                if selected is None:
                    result.dropped += 1
                    continue
                body = selected
            passed.append(body)
            kept.append(index)
        return result

    def _select(self, body: bytes) -> bytes | None:
        """Return the body of the copy; None: it does not meet the conditions. Raises NotJSON."""
        members = whole_object(text_of(body))
        for condition in self.conditions:
            if not condition.holds(members):
                return None
        return body if self.fields is None else body_of(self.fields.select(members))


def compile_pattern(text: bytes) -> Pattern:
    """Compile a regular expression for bytes, in the syntax of RE2. Raises ValueError.

    RE2 takes linear time for every pattern and body.
    """
    re2: Any = importlib.import_module("re2")  # the package has no type information
    options = re2.Options()
    options.log_errors = False  # RE2 would write them to stderr
    options.encoding = re2.Options.Encoding.LATIN1  # bodies are bytes
    try:
        compiled: Pattern = re2.compile(text, options)
    except re2.error as exc:
        raise ValueError(exc.args[0].decode("utf-8", "replace")) from None
    return compiled
