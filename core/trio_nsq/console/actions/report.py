"""What an action did, on each broker and discovery service, as texts for people."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..upstream.client import Results

LACKS_IT = "it does not have it"


@dataclass(frozen=True, slots=True)
class Report:
    """The result of an action.

    Attributes:
        done: What was done, by the address of the server.
        failed: Why it was not, likewise.
        left_out: Why a server was not asked, likewise, such as an nsqd that lacks the feature.
    """

    done: Mapping[str, str] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, results: Results[str], left_out: Mapping[str, str] | None = None) -> "Report":
        """Make the report of requests whose results are texts.

        A server without the topic or channel is left out, if another one has it.
        """
        failed = {address: error.reason for address, error in results.real_errors.items()}
        lacking = {address: LACKS_IT for address in results.errors if address not in failed}
        return cls(results.values, failed, {**lacking, **(left_out or {})})

    @property
    def is_success(self) -> bool:
        """Whether at least one server did it, and none failed."""
        return bool(self.done) and not self.failed

    @property
    def is_partial(self) -> bool:
        """Whether some servers did it, and others failed."""
        return bool(self.done) and bool(self.failed)
