"""How long one kind of work may keep others waiting: the numbers that share out the event loop's time."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pacing:
    """Numbers of a broker that are no settings: measurements chose them, and tests set others.

    The measurements are in docs/decisions: 0006 (group commit), 0007 (the poller) and 0008 (turns).

    Attributes:
        turn_s: So long one kind of work may take before other tasks have their turn: clients whose data is always
            there, publishers that publish again at once, deliveries to one channel. More than 0.
        clients_per_round: So many clients the poller hears of at a time.
        many_clients: While so many are served, others have sent something that goes into the same write.
        awake_s: Who waits for an answer before sending the next command mostly sends it within this time. To sleep and
            to be woken takes as long: so the poller waits for it awake, unless the last wait was longer.
        awake_at_most_s: After so long awake, trio looks who else needs a turn.
        commands_s: Small commands of one client that came together are executed for so long at a time.
        commands_at_least: So many of them are executed before the clock is looked at.
        channels_per_turn: So many channels are served at a time after a publish, or at the end of a round.
        grants_per_turn: So many deliveries of one channel are made at a time.
        waiting_s: While there is always a client to be served, deliveries that may wait do so for so long: what comes
            meanwhile is sent with them. It is the least that a client may ask for, by default
            (`--min-output-buffer-timeout`).
        gather_s: A sync is put off for at most so long because clients have more to send.
        tell_s: A thread that syncs reports its results after so long at the latest, also before it has synced all of
            its topics.
        min_commit_threads, max_commit_threads: How many threads sync.
        commit_s: While a sync takes no longer than this on average, the fewest threads are best, for each that works
            keeps the event loop waiting for Python's lock. On slower disks there are more threads.
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
