"""Finding a sequence by time."""

from bisect import bisect_left

from .interface import Log


def sequence_at(log: Log, timestamp_ns: int) -> int:
    """Return the first sequence that was published at this time or later; the end of the log if there is none.

    This bisects, over files and then over sequences, because timestamps ascend. If the clock was set back they do not,
    and several sequences fit: the message there was published at this time or later, and the readable one before it
    earlier. Then any of them is returned.

    Raises:
        LogReadError: The operating system refused.
    """

    def is_late(sequence: int) -> bool:
        header = next(log.headers(sequence), None)
        return header is None or header.timestamp_ns >= timestamp_ns

    first, end = log.first_sequence, log.next_sequence
    # The beginning of a file is found without its index, which may have to be read.
    starts = [file.base_sequence for file in log.files if first < file.base_sequence < end]
    late = bisect_left(starts, True, key=is_late)
    low = starts[late - 1] if late else first
    high = starts[late] if late < len(starts) else end
    return low + bisect_left(range(low, high), True, key=is_late)
