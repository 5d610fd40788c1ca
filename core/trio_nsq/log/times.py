"""From times to sequences."""

from bisect import bisect_left

from .interface import Log


def sequence_at(log: Log, timestamp_ns: int) -> int:
    """The first sequence that was published at this time or later; the end of the log if none was.

    Found by bisection, over files and then over sequences, for timestamps ascend. Where the clock was set back they do
    not, and several places fit: then it is any one of them. In each the message there, if it is readable, was
    published at this time or later and the readable one before it earlier.

    Raises:
        LogReadError: The operating system refused.
    """

    def is_late(sequence: int) -> bool:
        header = next(log.headers(sequence), None)
        return header is None or header.timestamp_ns >= timestamp_ns

    first, end = log.first_sequence, log.next_sequence
    # To look at the beginning of a file costs little; elsewhere its index has to be read.
    starts = [file.base_sequence for file in log.files if first < file.base_sequence < end]
    late = bisect_left(starts, True, key=is_late)
    low = starts[late - 1] if late else first
    high = starts[late] if late < len(starts) else end
    return low + bisect_left(range(low, high), True, key=is_late)
