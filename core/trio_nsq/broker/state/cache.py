"""An LRU cache of decoded batches, with one budget for all topics."""

from collections import OrderedDict

from .batch import Batch

Key = tuple[str, int]


class BatchCache:
    """Batches by (topic name, base sequence).

    Args:
        max_bytes: Maximum size of all batches; the newest one is kept even if it is larger.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._batches: OrderedDict[Key, Batch] = OrderedDict()
        self.size_bytes: int = 0

    def __len__(self) -> int:
        return len(self._batches)

    def __contains__(self, key: Key) -> bool:
        """Whether a batch is cached. Does not count as a use."""
        return key in self._batches

    def get(self, key: Key) -> Batch | None:
        batch = self._batches.get(key)
        if batch is not None:
            self._batches.move_to_end(key)
        return batch

    def put(self, topic: str, batch: Batch) -> None:
        key = (topic, batch.base_sequence)
        self.discard(key)
        self._batches[key] = batch
        self.size_bytes += batch.size_bytes
        self._make_room()

    def record_growth(self, by_bytes: int) -> None:
        """Record that the most recently used batch has grown."""
        self.size_bytes += by_bytes
        self._make_room()

    def _make_room(self) -> None:
        while self.size_bytes > self.max_bytes and len(self._batches) > 1:
            _, old = self._batches.popitem(last=False)
            self.size_bytes -= old.size_bytes

    def by_topic(self) -> dict[str, tuple[int, int]]:
        """Return the bytes and number of batches, by topic."""
        sizes: dict[str, tuple[int, int]] = {}
        for (topic, _), batch in self._batches.items():
            size_bytes, count = sizes.get(topic, (0, 0))
            sizes[topic] = size_bytes + batch.size_bytes, count + 1
        return sizes

    def discard(self, key: Key) -> None:
        batch = self._batches.pop(key, None)
        if batch is not None:
            self.size_bytes -= batch.size_bytes

    def forget_topic(self, topic: str) -> None:
        for key in [key for key in self._batches if key[0] == topic]:
            self.discard(key)
