"""Search for the sequences of message ids."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

from ...log import Log
from .broker import COUNTER_BITS
from .message_store import MessageStore

_COUNTER = (1 << COUNTER_BITS) - 1


def find_ids(store: MessageStore, ids: Iterable[int], carried: Sequence[int]) -> dict[int, int]:
    """Find the sequences of messages. Reads the log: call it in a thread.

    Args:
        ids: Message ids, as numbers.
        carried: Sequences, ascending, of messages that may have been carried forward.

    Returns:
        Sequences by id; lacks ids that were not found.

    Raises:
        LogReadError: The operating system failed to read.
    """
    found: dict[int, int] = {}
    for message_id in ids:
        sequence = _in_log(store.log, message_id)
        if sequence is None:
            sequence = _search(carried, lambda at: int(store.id_at(at) or "0", 16), message_id)
        if sequence is not None:
            found[message_id] = sequence
    return found


def _in_log(log: Log, message_id: int) -> int | None:
    def id_at(sequence: int) -> int:
        """Return the id of a message, or of the next existing one; at the end, an id larger than all."""
        for header in log.headers(sequence):
            return header.first_id + max(0, sequence - header.base_sequence)
        return 1 << 64

    on_disk = range(log.disk_first_sequence, log.next_sequence)
    sequence = _search(on_disk, id_at, message_id)
    if sequence is None and log.archived_files:
        sequence = _search(range(log.first_sequence, on_disk.start), id_at, message_id)
    header = next(log.headers(sequence), None) if sequence is not None else None
    # For a missing message, `id_at` returns the next one's id.
    return sequence if header is not None and header.base_sequence <= (sequence or 0) else None


def _search(sequences: Sequence[int], id_at: Callable[[int], int], message_id: int) -> int | None:
    """Search by bisection. Ids ascend; if the node id was changed, only their counters do."""
    for mask in (-1, _COUNTER):
        index = bisect_left(sequences, message_id & mask, key=lambda sequence: id_at(sequence) & mask)
        if index < len(sequences) and id_at(sequences[index]) == message_id:
            return sequences[index]
    return None
