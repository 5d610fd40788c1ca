"""Records of brokers and clusters: `nodes`, `stat`, `clients`, `cluster status`, `drain`, and the base of others."""

from typing import Any, Literal, TypedDict

from trio_nsq.api.answers import ArchiveProgress, ClusterMember, Diverged


class OfBroker(TypedDict, total=False):
    """A record of one of several brokers.

    Attributes:
        broker: The HTTP address of the broker, if several were asked.
    """

    broker: str


class NodeRecord(TypedDict):
    """A broker, a discovery service, or a member of a cluster. What it does not tell is null.

    Attributes:
        kind: member: a follower of the broker in the record before it.
        address: Its HTTP address; of a member without one, its id.
        status: ok, draining, unhealthy, refused or no answer; of a member, its state in the cluster.
        reason: Why it does not answer.
        health: OK, or NOK and the reason.
        draining: Whether it refuses publishes until it is empty.
        start_time: When it started, Unix seconds.
        uptime_s: Seconds since then.
        clients: Consumers.
        depth: Messages that wait, in all topics and channels.
        messages: Messages that were published since its start.
        oldest_message_age_ms: The highest age of a message that is ready or in flight, milliseconds.
        disk_used_bytes: The size of all logs.
        disk_free_bytes, disk_total_bytes: Of the disk of the data folder.
        configured: Whether its address was given; otherwise a discovery service lists it.
        registered_at, not_registered_at: Addresses of discovery services.
        tombstones: Topics whose consumers do not find the broker.
        brokers: Of a discovery service: how many brokers it lists.
        cluster, epoch, role: Of members of a cluster.
    """

    kind: Literal["broker", "lookupd", "member"]
    address: str
    status: str
    reason: str | None
    version: str | None
    health: str | None
    draining: bool | None
    hostname: str | None
    broadcast_address: str | None
    tcp_port: int | None
    http_port: int | None
    start_time: int | None
    uptime_s: int | None
    topics: int | None
    channels: int | None
    clients: int | None
    depth: int | None
    in_flight: int | None
    deferred: int | None
    messages: int | None
    oldest_message_age_ms: float | None
    disk_used_bytes: int | None
    disk_free_bytes: int | None
    disk_total_bytes: int | None
    configured: bool | None
    registered_at: list[str] | None
    not_registered_at: list[str] | None
    tombstones: list[str] | None
    brokers: int | None
    cluster: str | None
    epoch: int | None
    role: Literal["leader", "follower"] | None


class ProblemRecord(TypedDict):
    """A problem that `--check` found.

    Attributes:
        check: reachable, health, registered, cluster, archive, disk, age, depth or brokers.
        address: The broker or service; empty: all of them.
        about: The topic, `TOPIC/CHANNEL` or cluster; empty: the whole server.
        problem: What is wrong.
    """

    check: str
    address: str
    about: str
    problem: str


class StatRecord(TypedDict):
    """A topic or channel. Counts that it cannot have are null.

    Attributes:
        time: When it was asked, Unix seconds.
        channel: null: the record is about the topic.
        depth: Messages that wait, as nsqd counts them; of a topic, those that no channel has.
        backend_depth: Those of them that are on disk only.
        ingress_rate, egress_rate: Messages per second that arrived, and that were finished or emptied, since the last
            report; null in the first one.
        expired_count: Messages that became older than ttl.
        dropped_count: Messages that a limit removed.
        dead_letter_count, given_up_count: Messages after max_attempts.
        blocked_count: Messages that wait for an earlier one of their key.
        rate_limit_per_s: Messages per second; null: no limit.
        unavailable: Why the topic is unavailable; null: it is available.
        oldest_message_age_ms: The age of the oldest message that is ready or in flight, milliseconds.
        broker: The address with --by-broker; null: the sum of all brokers.
        total_depth: The depth of a topic with that of its channels; of a channel, its depth.
    """

    time: float
    topic: str | None
    channel: str | None
    depth: int | None
    backend_depth: int | None
    in_flight_count: int | None
    deferred_count: int | None
    requeue_count: int | None
    timeout_count: int | None
    message_count: int | None
    client_count: int | None
    paused: bool
    ingress_rate: float | None
    egress_rate: float | None
    expired_count: int | None
    dropped_count: int | None
    dead_letter_count: int | None
    given_up_count: int | None
    blocked_count: int | None
    rate_limit_per_s: int | None
    unavailable: str | None
    oldest_message_age_ms: float | None
    broker: str | None
    total_depth: int | None


class ClientRecord(TypedDict):
    """A connected consumer, or a producer and a topic. What does not apply to its kind is null.

    Attributes:
        broker: The HTTP address of the broker.
        channel: Where a consumer is subscribed; null: a producer.
        address: The client's address.
        agent: Its library, and the version.
        compression: null: none.
        identity: That of its token; null: it has none.
        in_flight: Messages that it has not finished.
        ready: How many messages it takes (RDY); 0 during a back-off.
        messages: Sent to the consumer, or published by the producer.
        rate: Messages per second; null with --interval 0, and for a client that connected meanwhile.
        connect_time: Unix seconds.
        connected_s: Seconds since then.
    """

    kind: Literal["consumer", "producer"]
    broker: str
    topic: str
    channel: str | None
    address: str
    client_id: str | None
    hostname: str | None
    agent: str | None
    tls: bool
    tls_version: str | None
    compression: Literal["snappy", "deflate"] | None
    identity: str | None
    in_flight: int | None
    ready: int | None
    messages: int
    finished: int | None
    requeued: int | None
    rate: float | None
    connect_time: int
    connected_s: int


class SeenCluster(TypedDict, total=False):
    """A cluster, as its leader sees it. Without a leader, `members` has the member that answered, as it sees itself.

    Attributes:
        epoch: Each leader has a higher one.
        leader: The id of the member that leads; null: there is no leader.
        since: Since when it leads, Unix seconds.
        coordinator: The URL of the coordinator, without a password.
        coordinator_error: Why the coordinator did not answer last; empty: it did.
        min_in_sync: How many members must have a message before it is acknowledged.
        refuses_because: Why publishes are refused; empty: they are accepted.
        archive: How far the archive of the leader is; absent: there is none.
        reason: Why there is no leader; null: there is one.
    """

    cluster: str
    epoch: int
    leader: str | None
    since: int
    coordinator: str | None
    coordinator_error: str | None
    min_in_sync: int
    refuses_because: str
    archive: ArchiveProgress
    members: list[ClusterMember]
    reason: str | None


class ClusterRecord(SeenCluster):
    """A cluster. Without a leader, `members` has the member that answered, as it sees itself.

    Attributes:
        problems: A sentence for each problem.
        diverged: By member: folders with what it had and its leader had not.
        answered_by: The address that was asked.
    """

    problems: list[str]
    diverged: dict[str, list[Diverged]]
    answered_by: str


class LeftRecord(TypedDict):
    """The messages that a channel still has.

    Attributes:
        channel: null: messages that no channel has.
        clients: Consumers.
    """

    topic: str
    channel: str | None
    depth: int
    in_flight: int
    deferred: int
    clients: int


class _DrainMove(TypedDict, total=False):
    moved: int
    waits_for: str


class DrainRecord(_DrainMove):
    """The progress of a drain.

    Attributes:
        broker: The HTTP address of the broker that drains.
        messages: How many are left.
        per_second: Messages that became fewer, recently; null: not known yet.
        seconds_left: The estimated time; null: not known.
        moved: Messages that this run moved to another broker; only with --move-to.
        waits_for: What a move waits for; absent: nothing.
        left: The topics and channels with messages.
        unavailable: Topics whose messages cannot be counted.
    """

    broker: str
    state: Literal["draining", "moving", "empty", "timeout"]
    messages: int
    per_second: float | None
    seconds_left: float | None
    left: list[LeftRecord]
    unavailable: list[str]


class TokenGrant(TypedDict):
    """Roles on the topics and channels that match patterns."""

    roles: list[str]
    topics: list[str]
    channels: list[str]


class _TokenSubject(TypedDict, total=False):
    subject: str


class TokenRecord(_TokenSubject):
    """An entry of an auth file.

    Attributes:
        kind: token, certificate or anonymous.
        subject: Of a certificate.
        expires: RFC 3339; null: never.
    """

    name: str
    kind: str
    grants: list[TokenGrant]
    expires: str | None
    expired: bool


class ContextRecord(TypedDict, total=False):
    """A context: a name for addresses and options. The keys after `current` are those that the file has.

    Attributes:
        current: Whether it is that of 'qcli context use'.
    """

    name: str
    current: bool
    description: str
    title_color: str
    nsqd_tcp_address: list[str]
    nsqd_http_address: list[str]
    lookupd_http_address: list[str]
    lookupd_allowed_host: list[str]
    tls: bool
    tls_root_ca_file: str
    tls_cert: str
    tls_key: str
    tls_insecure_skip_verify: bool
    auth_secret_file: str
    auth_secret_command: str
    auth_secret_keyring: str
    snappy: bool
    deflate: bool


UsedOption = TypedDict("UsedOption", {"name": str, "value": Any, "from": str})
"""An option that a command would use, its value, and where that is from."""


class UsedContextRecord(TypedDict):
    """What a command would use.

    Attributes:
        context: null: none.
        chosen_by: What names the context; null: none does.
    """

    context: str | None
    chosen_by: str | None
    options: list[UsedOption]
