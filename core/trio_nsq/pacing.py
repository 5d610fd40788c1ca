"""Time and work limits that share the event loop between clients, publishers and deliveries."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pacing:
    """Scheduling limits of a broker. They are not settings: measurements chose them, and tests set others.

    The measurements are in docs/decisions: 0006 (group commit), 0007 (the poller) and 0008 (turns).

    Attributes:
        turn_s: Maximum time of one kind of work before other tasks run: reading clients that always have data,
            publishers that publish again at once, deliveries to one channel. More than 0.
        clients_per_round: Maximum number of clients that the poller gets from the kernel at a time.
        many_clients: If a round has this many clients, the poller asks for further ones before the round ends: their
            publishes go into the same write.
        awake_s: Request/response clients usually send again within this time. Sleeping and waking takes as long, so
            the poller busy-waits for them, unless the last wait was longer.
        awake_at_most_s: Maximum time of busy-waiting before trio runs other tasks.
        commands_s: Maximum time to execute small commands that arrived together from one client.
        commands_at_least: Number of these commands that are executed between two looks at the clock.
        channels_per_turn: Maximum number of channels served after a publish, or at the end of a round.
        grants_per_turn: Maximum number of deliveries of one channel in a turn.
        waiting_s: While clients send all the time, deliveries that may wait do so for this long, and are sent together
            with later messages. It equals the default of `--min-output-buffer-timeout`.
        gather_s: Maximum delay of a sync that waits for more publishes.
        tell_s: A sync thread reports its results after this time at the latest, even if it has topics left to sync.
        min_commit_threads, max_commit_threads: Number of threads that sync.
        commit_s: If a sync takes less than this on average, the minimum number of threads is best: each working thread
            makes the event loop wait for the GIL. Slower disks get more threads.
    """

    turn_s: float = 0.005
    clients_per_round: int = 64
    many_clients: int = 8
    awake_s: float = 0.000_05
    awake_at_most_s: float = 0.001
    commands_s: float = 0.000_5
    commands_at_least: int = 32
    channels_per_turn: int = 16
    grants_per_turn: int = 16
    waiting_s: float = 0.025
    gather_s: float = 0.001
    tell_s: float = 0.005
    min_commit_threads: int = 2
    max_commit_threads: int = 16
    commit_s: float = 0.000_5
