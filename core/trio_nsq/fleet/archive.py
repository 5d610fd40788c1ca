"""How far the archive of a broker is, as it tells, and what is wrong with it. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from ..text.wording import count_of
from .stats import number, text

_LATE_S: Final = 5.0
"""An archive that is further behind is not up to date."""
_TOO_LATE_S: Final = 60.0
"""One that is further behind is a problem: the alert has the same limit."""


@dataclass(frozen=True, slots=True)
class Archive:
    """The archive of a broker.

    Attributes:
        url: Without secrets.
        state: See `trio_nsq.archive.writer.ArchiveStatus`; another one is told by a newer broker.
        error: Why it is not written; empty: it is.
        lag_s: The age of the oldest change that is not archived.
        conflicts: The number of segments under whose names it has other messages.
    """

    url: str
    state: str
    error: str
    lag_s: float
    conflicts: int = 0

    @classmethod
    def of(cls, stats: Mapping[str, Any]) -> Self | None:
        """Return the archive in an answer to `/stats`, untrusted; None: the broker has none."""
        raw = stats.get("archive")
        if not isinstance(raw, dict):
            return None
        lag_s = raw.get("lag_s")
        return cls(
            text(raw, "url"),
            text(raw, "state"),
            text(raw, "error"),
            lag_s if type(lag_s) is float and 0 <= lag_s < 1e12 else float(max(0, number(raw, "lag_s"))),
            number(raw, "conflicts"),
        )

    @property
    def is_late(self) -> bool:
        """Whether it is not up to date."""
        return self.lag_s >= _LATE_S

    @property
    def activity(self) -> str:
        """What it does: `written`, `not written`, `waiting`, or `the data folder is copied`."""
        if self.error:
            return "not written"
        return {"archiving": "written", "copying": "the data folder is copied"}.get(self.state, "waiting")

    @property
    def problem(self) -> str:
        """What is wrong, without a full stop; empty: nothing."""
        if self.error and (self.state == "waiting" or self.lag_s >= _TOO_LATE_S):
            return f"its archive is not written, and is {self.lag_s:,.0f} s behind: {self.error.removesuffix('.')}"
        if self.lag_s >= _TOO_LATE_S:
            return f"its archive is {self.lag_s:,.0f} s behind"
        if self.conflicts > 0:
            return (
                f"its archive has other messages under the names of {count_of(self.conflicts, 'segment')}, which stay "
                "on the disk: the broker was restored from an older state, and needs another archive"
            )
        return ""
