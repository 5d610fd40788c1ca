"""The levels of partition folders by fields: the values themselves, or transforms of them, as Iceberg has them.

country              country=de
bucket(16,user_id)   user_id_bucket=3           the hash of the value, modulo the number of buckets
truncate(2,country)  country_trunc=de           the first characters of text, or a number rounded down to a multiple
year(created)        created_year=2026          of a time or date, in UTC
month(created)       created_month=2026-11
day(created)         created_day=2026-11-21
hour(created)        created_hour=2026-11-21-04
"""

import re
from dataclasses import dataclass
from enum import StrEnum

MAX_SIZE = 2**31 - 1
_CALL = re.compile(r"(\w+)\((.*)\)", re.DOTALL)
_SIZED = re.compile(r"\s*([0-9]{1,10})\s*,(.*)", re.DOTALL)


class Transform(StrEnum):
    """What names the folders; the value is the name in `--partition-by`, except for that of the values themselves."""

    IDENTITY = "identity"
    BUCKET = "bucket"
    TRUNCATE = "truncate"
    YEAR = "year"
    MONTH = "month"
    DAY = "day"
    HOUR = "hour"

    @property
    def is_of_time(self) -> bool:
        """Whether it is of times."""
        return self in (Transform.YEAR, Transform.MONTH, Transform.DAY, Transform.HOUR)

    @property
    def has_size(self) -> bool:
        """Whether it has a number of buckets, or a width."""
        return self in (Transform.BUCKET, Transform.TRUNCATE)


@dataclass(frozen=True, slots=True)
class Level:
    """A level of folders; its text can be parsed again.

    Attributes:
        size: The number of buckets, or the width of a truncation; otherwise 0.
    """

    transform: Transform
    field: str
    size: int = 0

    def __str__(self) -> str:
        if self.transform is Transform.IDENTITY:
            return self.field
        return f"{self.transform}({f'{self.size},' if self.size else ''}{self.field})"

    @property
    def suffix(self) -> str:
        """The end of the name of the folders, after that of the field; empty for the values themselves."""
        if self.transform is Transform.IDENTITY:
            return ""
        return "_trunc" if self.transform is Transform.TRUNCATE else f"_{self.transform}"


def parse_level(text: str) -> Level:
    """Parse `FIELD`, or `TRANSFORM(FIELD)` or `TRANSFORM(SIZE,FIELD)`. Raises ValueError."""
    found = _CALL.fullmatch(text)
    if found is None:
        return Level(Transform.IDENTITY, text)
    name, arguments = found[1].lower(), found[2]
    if name not in set(Transform) - {Transform.IDENTITY}:
        raise ValueError(f"{name!r} is not one of bucket, truncate, year, month, day, hour")
    transform, size = Transform(name), 0
    if transform.has_size:
        sized = _SIZED.fullmatch(arguments)
        if sized is None or not 0 < int(sized[1]) <= MAX_SIZE:
            raise ValueError(f"{text!r} is not {name}(NUMBER,FIELD), such as {name}(16,user_id)")
        size, arguments = int(sized[1]), sized[2]
    if not (field := arguments.strip()):
        raise ValueError(f"{text!r} has no field")
    return Level(transform, field, size)


def split_levels(text: str) -> list[str]:
    """Split levels at the commas that are not in parentheses."""
    return [each.strip() for each in re.split(r",(?![^(]*\))", text)]
