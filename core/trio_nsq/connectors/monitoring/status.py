"""The status of a job that runs permanently, as its HTTP endpoints and its reports tell it. No IO."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...text.wording import count_of

MAX_PROBLEMS = 20
"""Of more problems, only the number is told: with a thousand topics, one broker that is down makes a thousand."""


@dataclass(slots=True)
class TopicStatus:
    """What a job has done for one topic since its start. What a connector does not have stays 0.

    Attributes:
        messages, body_bytes: Messages that are stored, and the bytes of their bodies.
        files, file_bytes: Files that were written, and their size.
        unparsed: Messages whose body is in the column `unparsed`.
        misfits: Values that did not fit their column.
        left_out: Messages that were not stored because they are copies, repetitions, or not chosen by a filter.
        missing: Messages that were lost before they were read: retention deleted them, or they are damaged.
        dead_letters: Messages that were published to a dead-letter topic.
        failures: Rounds, requests of to-http, attempts of to-file to write, or of to-nsq to publish, that failed.
        error: Why the last one failed, a sentence that makes sense without the topic; empty: it succeeded, or is not
            known.
        lag: Messages that are known and not stored yet; None: not known.
        lag_s: All messages that were published this many seconds ago, or before, are stored; None: not known.
        last_round_at: When the last complete round ended, Unix seconds; None: there was none, or there are no rounds.
    """

    topic: str
    messages: int = 0
    body_bytes: int = 0
    files: int = 0
    file_bytes: int = 0
    unparsed: int = 0
    misfits: int = 0
    left_out: int = 0
    missing: int = 0
    dead_letters: int = 0
    failures: int = 0
    error: str = ""
    lag: int | None = None
    lag_s: float | None = None
    last_round_at: float | None = None


@dataclass(frozen=True, slots=True)
class JobStatus:
    """The status of a job at one moment.

    Attributes:
        kind: The command, such as `to-parquet`.
        name: What people call it. It has no secrets.
        started_at: Unix seconds.
        topics: Sorted by name.
        problems: Why it is not healthy, at most `MAX_PROBLEMS` + 1 sentences; empty: it is.
        rounds: Complete rounds; None: there are no rounds.
        written: Messages that were written, also of files that are not complete yet. It may decrease: ranges whose
            values do not fit are written again.
    """

    kind: str
    name: str
    started_at: float
    topics: Sequence[TopicStatus]
    problems: Sequence[str] = ()
    rounds: int | None = None
    written: int = 0

    @property
    def lag(self) -> int | None:
        """The known messages that are not stored yet, of all topics; None: not known of any."""
        known = [each.lag for each in self.topics if each.lag is not None]
        return sum(known) if known else None

    @property
    def lag_s(self) -> float | None:
        """The greatest lag of a topic in seconds; None: not known of any."""
        return max((each.lag_s for each in self.topics if each.lag_s is not None), default=None)

    @property
    def failures(self) -> int:
        return sum(each.failures for each in self.topics)


def problems_of(
    topics: Iterable[TopicStatus], max_lag_s: float | None, others: Iterable[str] = ()
) -> list[str]:
    """Return why a job is not healthy.

    Args:
        max_lag_s: The greatest lag of a healthy topic; None: any.
        others: Problems of the whole job, which come first.
    """
    found = list(others)
    for each in topics:
        if each.error:
            found.append(each.error)
        elif max_lag_s is not None and each.lag_s is not None and each.lag_s > max_lag_s:
            found.append(f"{each.topic}: the lag is {each.lag_s:.0f} s, more than {max_lag_s:g} s")
    found = list(dict.fromkeys(found))  # of a broker that does not answer, all topics have the same
    if (more := len(found) - MAX_PROBLEMS) > 0:
        found[MAX_PROBLEMS:] = [f"and {count_of(more, 'more problem')}"]
    return found
