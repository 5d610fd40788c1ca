"""Which dead letters are in a topic, and which have left its channels, until the saved states say so.

A dead letter is stored in the dead-letter topic first, and leaves its channel afterwards. Until the channel's topic is
saved, a restart would find it in both: so the dead-letter topic remembers those that are not *confirmed*.
"""

from collections.abc import Mapping

from .version import Version


class DeadLetterLedger:
    """The ledger of one topic, which may be a dead-letter topic, and may have channels with dead letters."""

    def __init__(self, version: Version) -> None:
        self._version = version
        # The first sequence of the dead letters here, by their metadata, ascending.
        self._unconfirmed: dict[bytes, int] = {}
        # Dead letters that left the channels since the last checkpoint: the ledger of the topic they are in, and the
        # metadata they have there.
        self._moved: list[tuple[DeadLetterLedger, bytes]] = []

    @property
    def unconfirmed(self) -> Mapping[bytes, int]:
        """The letters here that may be in the saved states of their channels, too: metadata and first sequence."""
        return self._unconfirmed

    def confirmed_before(self, end: int) -> int:
        """The sequence before which all letters are confirmed; `end` if all are."""
        return next(iter(self._unconfirmed.values()), end)

    def record_here(self, metadata: bytes, sequence: int) -> None:
        """Remember letters that are in the log."""
        # A channel that was moved back may give up the very same again: it goes to the end.
        self._unconfirmed.pop(metadata, None)
        self._unconfirmed[metadata] = sequence
        self._version.increment()

    def confirm(self, metadata: bytes) -> None:
        """Forget letters that are not in the saved state of the channel they come from any more."""
        if self._unconfirmed.pop(metadata, None) is not None:
            self._version.increment()

    @property
    def moved_count(self) -> int:
        """How many groups of letters have left the channels since the last checkpoint."""
        return len(self._moved)

    def record_moved(self, to: "DeadLetterLedger", metadata: bytes) -> None:
        """Remember letters that have left a channel; the next checkpoint lacks them."""
        self._moved.append((to, metadata))
        self._version.increment()

    def confirm_moved(self, count: int) -> None:
        """Confirm the first of these groups: a checkpoint is on disk that lacks them."""
        moved = self._moved[:count]
        del self._moved[:count]
        for ledger, metadata in moved:
            ledger.confirm(metadata)
