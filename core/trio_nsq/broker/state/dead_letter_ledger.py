"""Notes which dead letters of a topic are stored or finished, but not confirmed: see `moved_letters.py`."""

from collections.abc import Mapping

from .version import Version


class DeadLetterLedger:
    """The ledger of one topic, which may be a dead-letter topic, or have channels with dead letters, or both."""

    def __init__(self, version: Version) -> None:
        self._version = version
        # First sequence of each group of dead letters in this topic, by metadata, ascending.
        self._unconfirmed: dict[bytes, int] = {}
        # Groups that left this topic's channels since the last checkpoint: the ledger of their dead-letter topic, and
        # their metadata there.
        self._moved: list[tuple[DeadLetterLedger, bytes]] = []

    @property
    def unconfirmed(self) -> Mapping[bytes, int]:
        """Metadata and first sequence of letters here that may also be in the saved states of their channels."""
        return self._unconfirmed

    def confirmed_before(self, end: int) -> int:
        """Return the sequence before which all letters are confirmed; `end` if all are."""
        return next(iter(self._unconfirmed.values()), end)

    def record_here(self, metadata: bytes, sequence: int) -> None:
        """Record letters that are in this topic's log."""
        # After a seek, a channel may exhaust the same messages again: move them to the end.
        self._unconfirmed.pop(metadata, None)
        self._unconfirmed[metadata] = sequence
        self._version.increment()

    def confirm(self, metadata: bytes) -> None:
        """Forget letters that are no longer in the saved state of their channel."""
        if self._unconfirmed.pop(metadata, None) is not None:
            self._version.increment()

    @property
    def moved_count(self) -> int:
        """Number of groups of letters that left the channels since the last checkpoint."""
        return len(self._moved)

    def record_moved(self, to: "DeadLetterLedger", metadata: bytes) -> None:
        """Record letters that have left a channel; the next checkpoint no longer has them."""
        self._moved.append((to, metadata))
        self._version.increment()

    def confirm_moved(self, count: int) -> None:
        """Confirm the first `count` groups: a checkpoint without them is on disk."""
        moved = self._moved[:count]
        del self._moved[:count]
        for ledger, metadata in moved:
            ledger.confirm(metadata)
