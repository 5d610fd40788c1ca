"""The answers of brokers, with the fields that clients read; `broker` has the requests.

This is the only place that names these fields with their types. `tests/client/test_api.py` compares them with the
answers of a running broker. What an nsqd or an older broker does not tell is not required.
"""

from typing import Any, Required, TypedDict

from ..text.settings import SETTINGS
from .fields import Field

# ---------------------------------------------------------------------- /info, /stats


class ProcessAddresses(TypedDict):
    """The addresses of a process of a node; without HTTP, the second one is empty."""

    tcp_address: str
    http_address: str


class Info(TypedDict, total=False):
    """The answer of `/info`."""

    version: str
    broadcast_address: str
    hostname: str
    http_port: int
    tcp_port: int
    start_time: int
    instance: str
    draining: bool
    processes: list[ProcessAddresses]


class PubCount(TypedDict):
    """How many messages a producer published to a topic."""

    topic: str
    count: int


class ClientStats(TypedDict, total=False):
    """A consumer or producer."""

    client_id: str
    hostname: str
    user_agent: str
    remote_address: str
    version: str
    tls_version: str
    auth_identity: str
    state: int
    ready_count: int
    in_flight_count: int
    message_count: int
    finish_count: int
    requeue_count: int
    connect_ts: int
    tls: bool
    snappy: bool
    deflate: bool
    authed: bool
    pub_counts: list[PubCount]


class QueueStats(TypedDict, total=False):
    """What `/stats` tells of a topic or channel."""

    depth: Required[int]
    message_count: Required[int]
    backend_depth: int
    in_flight_count: int
    deferred_count: int
    message_bytes: int
    requeue_count: int
    timeout_count: int
    client_count: int
    oldest_message_age_ms: int
    expired_count: int
    dropped_count: int
    dead_letter_count: int
    given_up_count: int
    paused: bool
    unavailable: str


class ChannelStats(QueueStats, total=False):
    """A channel of `/stats`."""

    channel_name: Required[str]
    blocked_count: int
    clients: list[ClientStats]
    rate_limit_per_s: int


class TopicStats(QueueStats, total=False):
    """A topic of `/stats`.

    Attributes:
        first_sequence: Where its log begins; of topics that keep messages, or have some only in the archive.
        disk_first_sequence, archived_bytes: Where the messages on the disk begin, and the size of what only the
            archive has; if there is some.
        table: The table that the topic declares; only if it does.
    """

    topic_name: Required[str]
    moving_to: str
    table: str
    first_sequence: int
    disk_first_sequence: int
    archived_bytes: int
    channels: list[ChannelStats]


class DiskStats(TypedDict, total=False):
    """The disk of a broker's data folder."""

    used_bytes: int
    free_bytes: int
    total_bytes: int


class ClusterCounts(TypedDict, total=False):
    """What `/stats` tells of the cluster that the broker leads.

    Attributes:
        in_sync, members: How many members are in sync, and how many there are.
    """

    name: Required[str]
    epoch: Required[int]
    role: Required[str]
    in_sync: int
    members: int


class ArchiveProgress(TypedDict, total=False):
    """How far an archive is: see `trio_nsq.archive.writer.ArchiveStatus`."""

    url: Required[str]
    state: Required[str]
    error: Required[str]
    lag_operations: Required[int]
    lag_bytes: Required[int]
    lag_s: Required[float]
    checkpoints: int
    checkpoint_time_ms: int
    objects: int
    object_bytes: int
    segments: int
    conflicts: int
    owner: str


class ArchiveStats(ArchiveProgress, total=False):
    """What `/stats` tells of the broker's archive.

    Attributes:
        retention_waits: The number of topics with expired files that are not archived yet.
    """

    retention_waits: int


class Stats(TypedDict, total=False):
    """The answer of `/stats`. An nsqd may have null instead of lists."""

    version: str
    health: str
    start_time: int
    draining: bool
    cluster: ClusterCounts
    archive: ArchiveStats
    topics: list[TopicStats]
    producers: list[ClientStats]
    disk: DiskStats


# ---------------------------------------------------------------------- messages


class Gap(TypedDict, total=False):
    """Messages that are missing in a log; `state` if a channel wants to deliver them."""

    topic: Required[str]
    gap: Required[str]
    first_sequence: Required[int]
    next_sequence: Required[int]
    state: str


class Message(TypedDict, total=False):
    """A message of a topic. Its body is in one of the last two fields."""

    topic: Required[str]
    id: Required[str]
    timestamp_ns: Required[int]
    attempts: Required[int]
    sequence: Required[int]
    due_ns: Required[int | None]
    channel: str
    headers: dict[str, str]
    body: str
    body_base64: str


class ChannelMessage(Message):
    """A message that waits in a channel."""

    state: str


class Origin(TypedDict):
    """Where a dead letter was before.

    Attributes:
        topic, channel: The channel that exhausted the message's attempts.
        id: Its id in that topic, 16 hex digits.
        sequence: Its sequence in that topic.
        attempts: How often that channel delivered it.
        timestamp_ns: When it was published in that topic, Unix nanoseconds.
        reason: Why its last delivery failed: requeued, timed_out or connection_lost.
    """

    topic: str
    channel: str
    id: str
    sequence: int
    attempts: int
    timestamp_ns: int
    reason: str


class DeadLetter(Message):
    """A message of a dead-letter topic; a producer's own has no origin."""

    origin: Origin | None


# ---------------------------------------------------------------------- logs and channels


class LogBounds(TypedDict, total=False):
    """The answer of `/topic/bounds`. Older brokers, and logs without messages, tell no incarnation.

    Attributes:
        first_sequence: Where the log begins, with what only the archive has.
        disk_first_sequence: Where the messages on the disk begin. Older brokers do not tell it.
    """

    first_sequence: Required[int]
    disk_first_sequence: int
    next_sequence: Required[int]
    incarnation: str


class LogPosition(LogBounds, total=False):
    """The answer of `/topic/bounds` with a position. Older brokers do not tell the last one."""

    bytes: Required[int]
    at_sequence: Required[int]
    bytes_from_at: int


class Seek(TypedDict):
    """The move of a channel, done or only planned.

    Attributes:
        from_sequence, to_sequence: The old and the new position.
        delivered_again: Finished messages after the new position.
        skipped: Unfinished messages before it.
        in_flight: Messages in flight, which cannot be finished any more.
        limited_by: earliest or latest if the log did not reach to the position; else null.
    """

    topic: str
    channel: str
    from_sequence: int
    to_sequence: int
    delivered_again: int
    skipped: int
    in_flight: int
    limited_by: str | None
    dry_run: bool


class DeferredCounts(TypedDict):
    """How many messages of a channel are deferred, and how many are due before each of the times asked for."""

    deferred_count: int
    first_due_ns: int | None
    last_due_ns: int | None
    due_before: list[int]


def settings_fields(kind: str) -> tuple[Field, ...]:
    """Return the fields of the settings of a `topic` or `channel`; an older broker has only some, and the first."""
    first, *_ = SETTINGS[kind]
    return tuple(
        Field(each.key, str if each.parse is str else int, needed=each is first) for each in SETTINGS[kind]
    )


class ChannelDefinition(TypedDict):
    """A channel of `/definitions`.

    Attributes:
        settings: Those that are set, by the broker's keys; the others have the defaults.
    """

    channel_name: str
    paused: bool
    settings: dict[str, Any]


class TopicDefinition(TypedDict, total=False):
    """A topic of `/definitions`; `settings` as those of a channel.

    Attributes:
        unavailable: Why the broker cannot use the topic. Then it tells no channels and settings.
    """

    topic_name: Required[str]
    paused: Required[bool]
    settings: Required[dict[str, Any]]
    channels: Required[list[ChannelDefinition]]
    unavailable: str


class Definitions(TypedDict):
    """The answer of `/definitions`: the topics and channels that are not ephemeral."""

    topics: list[TopicDefinition]


class Disconnected(TypedDict):
    """A consumer that the broker has disconnected, by its id and address."""

    client_id: str
    remote_address: str


# ---------------------------------------------------------------------- dead letters


class DeadLetterTopic(TypedDict):
    """A dead-letter topic."""

    topic: str


class LetterCount(TypedDict):
    """How many letters have the same origin and reason; all null if a producer published them."""

    topic: str | None
    channel: str | None
    reason: str | None
    count: int
    first_ns: int
    last_ns: int


class LetterCounts(TypedDict):
    """The answer of `/dead_letters` for a topic. It continues at `next_sequence`."""

    origins: list[LetterCount]
    in_flight: int
    next_sequence: int | None


class LettersKept(TypedDict):
    """How many letters could not be requeued, and why."""

    why: str
    count: int


class LettersMoved(TypedDict, total=False):
    """The answer of `/dead_letters/requeue` and `/dead_letters/drop`. It continues at `next_sequence`."""

    next_sequence: Required[int | None]
    kept: list[LettersKept]
    done: int


# ---------------------------------------------------------------------- moves of topics


class MoveStream(TypedDict, total=False):
    """A part of a topic's move: a channel, or the messages that no channel has."""

    producer: Required[str]
    begun: Required[bool]
    left: Required[int]
    moved: int | None
    channel: str | None
    withdrawn: int
    dead_letter_topic: str


class Move(TypedDict):
    """The move of a topic to another broker."""

    move: str
    to: str
    began_ns: int
    streams: list[MoveStream]


class ProducerState(TypedDict, total=False):
    """What a broker remembers of an idempotent producer.

    Attributes:
        number: The greatest number published; None if there is none.
        instance: Which run of the producer gave that number; None if it belongs to the content. Older brokers do not
            tell.
        may_be_forgotten: The broker may have forgotten a number. Older brokers do not tell.
    """

    number: Required[int | None]
    instance: str | None
    may_be_forgotten: bool


# ---------------------------------------------------------------------- clusters


class ClusterMember(TypedDict, total=False):
    """A member of a cluster, as its leader sees it.

    Attributes:
        id: Of its data folder.
        addresses: Where it is reached: URLs with the schemes tcp, http and https.
        state: `leading`, `in sync`, `catching up` or `disconnected`.
        in_sync: Whether OKs wait for it, so that it may lead.
        lag_operations, lag_bytes, lag_s: What it lacks, and the age of the oldest operation that it lacks.
        since: When the state began, Unix seconds; 0: unknown.
        ok_wait_s: In what time it stores operations, about: OKs wait for that.
        is_slow: That is long.
        copied_bytes, copy_bytes: Of the leader's files, while it catches up: those that it has, and all.
        free_bytes: Free space of its disk; None: unknown. 0 also if it was full, and cannot be written.
    """

    id: Required[str]
    addresses: Required[list[str]]
    state: Required[str]
    in_sync: Required[bool]
    lag_operations: int
    lag_bytes: int
    lag_s: float
    since: int
    ok_wait_s: float
    is_slow: bool
    copied_bytes: int
    copy_bytes: int
    free_bytes: int | None


class Cluster(TypedDict, total=False):
    """The answer of `/cluster`.

    Attributes:
        leader: The id of the member that leads.
        since: Since when it leads, Unix seconds.
        coordinator: The URL of the coordinator, without a password.
        coordinator_error: Why the coordinator did not answer last; empty: it did.
        refuses_because: Why publishes are refused; empty: they are not.
        archive: How far the archive of the leader is.
    """

    cluster: Required[str]
    epoch: Required[int]
    leader: Required[str]
    since: int
    coordinator: str
    coordinator_error: str
    min_in_sync: int
    refuses_because: str
    archive: ArchiveProgress
    members: Required[list[ClusterMember]]


class Diverged(TypedDict):
    """A folder with what a member had, and its leader had not."""

    name: str
    files: int
    bytes: int


class MemberView(TypedDict, total=False):
    """The answer of `/cluster/member`, which each member gives itself.

    Attributes:
        id: Of this member.
        role: `leader` or `follower`.
        epoch: The highest that it has seen.
        leader: The id of the member that leads; None: this one knows no leader.
        is_following: Whether it is connected to the leader.
        reason: Why it does not follow; empty: nothing is wrong.
        is_copy: Its folder is a copy of a leader's; otherwise it led last, or is new.
        diverged: What catch-ups have kept in its data folder.
        position: The last operation of its epoch that it has on stable storage.
    """

    cluster: Required[str]
    id: Required[str]
    role: Required[str]
    epoch: Required[int]
    leader: Required[str | None]
    leader_addresses: list[str]
    addresses: list[str]
    is_following: bool
    is_copy: bool
    diverged: list[Diverged]
    position: int
    in_sync: bool
    reason: str
    coordinator: str
    coordinator_error: str
