"""Time and work limits that share the event loop between clients, publishers and deliveries."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pacing:
    """Scheduling limits of a broker. They are not settings: measurements chose them, and tests set others.

    The measurements are in docs/decisions: 0006 (group commit), 0007 (the poller), 0008 (turns) and 0027 (write-ahead
    log).

    Attributes:
        turn_s: Maximum time of one kind of work before other tasks run: reading clients that always have data,
            publishers that publish again at once, busy-waiting and naps for clients, deliveries to one channel. More
            than 0.
        clients_per_round: Maximum number of clients that the poller gets from the kernel at a time.
        many_clients: If a round has this many clients, the poller asks for further ones before the round ends: their
            publishes go into the same write.
        spin_s: Request/response clients usually send again within this time. Sleeping and waking takes as long, so
            the poller busy-waits for them, unless the last wait was longer.
        nap_s: While syncs take less than this on average, or clients send often, the poller sleeps for at most this
            long without trio.
        commands_s: Maximum time to execute small commands that arrived together from one client.
        commands_at_least: Number of these commands that are executed between two looks at the clock.
        channels_per_turn: Maximum number of channels served after a publish, or at the end of a round.
        grants_per_turn: Maximum number of deliveries of one channel in a turn.
        waiting_s: While clients send all the time, deliveries that may wait do so for this long, and are sent together
            with later messages. It equals the default of `--min-output-buffer-timeout`.
        refilling_s: While clients send all the time, a consumer with most of its RDY in flight gets no message for this
            long. Its next delivery then has more.
        finishes_s: How long further FINs of a consumer stay in its socket, if it sends several in this time and has
            enough messages meanwhile. Reading each alone costs more than the rest of a delivery.
        coalesce_s: Maximum delay of a sync that waits for more publishes.
        min_commit_threads, max_commit_threads: Number of threads that sync.
        fast_sync_s: If syncs take less than this on average, the minimum number of threads is best: each working thread
            makes the event loop wait for the GIL. Slower disks get more threads. And if none was longer than `turn_s`,
            the event loop syncs by itself if it has nothing else to do. More than 0.
        small_sync_bytes: Maximum bytes of such a sync, and of a topic's waiting writes for the write-ahead log: that
            doubles what is written, so it gains only if syncs take longer than the bytes.
        loop_pause: After a sync that took longer than `turn_s`, only threads sync for this many times its duration. So
            slow syncs stop the event loop for at most 1 % of the time.
        cut_retry_s, cut_retry_max_s: Pause after the first failure to remove refused messages from the disk; each
            further pause is twice as long, up to the maximum.
        wal_topics: If so many topics wait for a sync, one sync of the write-ahead log serves all.
        wal_file_bytes, wal_file_s: Size and age at which the next write-ahead file is begun. A file may have twice
            this size. At the start after a crash, up to three files are read.
        wal_retry_s: Pause after an error of the write-ahead log.
        archive_late_s: With `--archive-before-ok`, publishes are refused while the archive is later than this.
        archive_stop_s: A stop waits for the archive for this time.
    """

    turn_s: float = 0.005
    clients_per_round: int = 64
    many_clients: int = 8
    spin_s: float = 0.000_05
    nap_s: float = 0.001
    commands_s: float = 0.000_5
    commands_at_least: int = 32
    channels_per_turn: int = 16
    grants_per_turn: int = 16
    waiting_s: float = 0.025
    refilling_s: float = 0.001
    finishes_s: float = 0.001
    coalesce_s: float = 0.001
    min_commit_threads: int = 2
    max_commit_threads: int = 16
    fast_sync_s: float = 0.000_5
    small_sync_bytes: int = 64 * 1024
    loop_pause: int = 100
    cut_retry_s: float = 0.1
    cut_retry_max_s: float = 10.0
    wal_topics: int = 3
    wal_file_bytes: int = 16 * 1024 * 1024
    wal_file_s: float = 10.0
    wal_retry_s: float = 10.0

    def __post_init__(self) -> None:
        if self.fast_sync_s <= 0:
            raise ValueError("fast_sync_s must be more than 0")

    archive_late_s: float = 10.0
    archive_stop_s: float = 10.0
