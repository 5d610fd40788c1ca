"""From message ids to sequences."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

from ...log import Log
from .broker import COUNTER_BITS
from .message_store import MessageStore

_COUNTER = (1 << COUNTER_BITS) - 1


def find_ids(store: MessageStore, ids: Iterable[int], carried: Sequence[int]) -> dict[int, int]:
    """Where messages lie; to be called in a thread.

    Args:
        store: Where they are.
        ids: As numbers.
        carried: Sequences, ascending, that may have been carried forward out of the log's files.

    Returns:
        Sequence by id, of those that were found.

    Raises:
        LogReadError: The operating system refused.
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
        """The message's id, or that of the first one after it; a larger one than any at the end."""
        for header in log.headers(sequence):
            return header.first_id + max(0, sequence - header.base_sequence)
        return 1 << 64

    sequences = range(log.first_sequence, log.next_sequence)
    sequence = _search(sequences, id_at, message_id)
    header = next(log.headers(sequence), None) if sequence is not None else None
    # What is missing has got the id of the next.
    return sequence if header is not None and header.base_sequence <= (sequence or 0) else None


def _search(sequences: Sequence[int], id_at: Callable[[int], int], message_id: int) -> int | None:
    """By bisection, for ids ascend; where the node's number was changed, at least the counter below it does."""
    for mask in (-1, _COUNTER):
        index = bisect_left(sequences, message_id & mask, key=lambda sequence: id_at(sequence) & mask)
        if index < len(sequences) and id_at(sequences[index]) == message_id:
            return sequences[index]
    return None
