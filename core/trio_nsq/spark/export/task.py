"""The task of an export: write one range to Parquet files, in this process or in a Spark worker."""

import os
from dataclasses import dataclass, replace

from ...client.reading.log_stream import is_for_all_channels
from ...log.gaps import Gap, Span
from ...storage import Storage, not_shared
from ..logs import BrokerPlace, LogPlace
from ..places import storage_at
from ..runtime.engine import Advance
from .dead_letters import LetterPublisher
from .files import RangeFiles
from .layout import Layout
from .manifest import Manifest, RangeResult, manifest_path, result_path
from .request import ExportRequest


@dataclass(frozen=True, slots=True)
class ExportTask:
    """A range to export. Can be pickled.

    Attributes:
        log: The log to read.
        layout_index: The index of the layout in the manifest.
        export_id: The id of the manifest in the folder; empty: not checked.
        is_repeated: Whether an earlier run may have published files of the range: it has planned it, and was killed.
    """

    request: ExportRequest
    layout: Layout
    log: LogPlace
    span: Span
    layout_index: int = 0
    export_id: str = ""
    is_repeated: bool = False

    @property
    def broker(self) -> str:
        return self.log.label

    @property
    def messages(self) -> int:
        return self.span.length

    def run(self, advance: Advance | None = None, storage: Storage | None = None) -> RangeResult:
        """Write the files of the range, then its result; if there is a result, only return it.

        If values need wider columns than those of the layout, nothing is written: see `RangeResult.widen`.

        Files get their final names when all of them are complete. On an error, temporary files are removed, unless the
        process is killed.

        Args:
            advance: Called with the number of messages and bytes of each record.
            storage: The storage to write to; None: the folder of the request.

        Raises:
            BrokerUnreachable, RequestRefused, LogReplaced, RawStreamError, LogReadError: The range cannot be read.
            SchemaViolation: A message does not fit the columns, and the contract forbids that.
            OSError, StorageError: The files cannot be written, or the folder is not that of the manifest.
        """
        storage = storage or storage_at(self.request.place)
        if self.export_id:
            _check_shared(storage, manifest_path(self.request.topic), self.export_id)
        path = result_path(self.request.topic, self.broker, self.span)
        if (existing := storage.read(path)) is not None:
            return RangeResult.from_bytes(existing.data)
        letters = self._letters()
        files = RangeFiles(storage, self.request, self.layout, self.broker, self.span, letters)
        try:
            result = self._write(files, advance)
            if result.widen:
                files.discard()
                return result
            # Of a range with gaps, an earlier file may have messages that are no longer retained.
            files.publish(replaces=self.is_repeated and not result.gaps)
        except BaseException:
            files.discard()
            raise
        finally:
            if letters is not None:
                letters.close()
        result = replace(result, files=files.names, file_bytes=files.file_bytes)
        if not storage.put_new(path, result.to_bytes()) and (existing := storage.read(path)) is not None:
            return RangeResult.from_bytes(existing.data)  # of another attempt
        return result

    def _letters(self) -> LetterPublisher | None:
        topic = self.request.dead_letter_topic
        if topic is None or not isinstance(self.log, BrokerPlace):
            return None
        return LetterPublisher(self.log, topic)

    def _write(self, files: RangeFiles, advance: Advance | None) -> RangeResult:
        span = self.span
        gaps: list[tuple[int, int, str]] = []
        messages = body_bytes = for_one_channel = 0
        last_id = None
        for found in self.log.open().read(span):
            if isinstance(found, Gap):
                gaps.append((found.first_sequence, found.next_sequence, found.reason))
                if advance is not None:
                    advance(found.next_sequence - found.first_sequence, 0)
                continue
            count = found.count
            if found.next_sequence == span.end:
                last_id = found.last_id
            if not is_for_all_channels(found):
                for_one_channel += count
                continue
            size = files.add(found)
            messages += count
            body_bytes += size
            if advance is not None:
                advance(count, size)
            if files.builder.widen:
                break
        else:
            files.close()
        if files.builder.widen:
            if advance is not None:
                missing = sum(end - first for first, end, _ in gaps)
                advance(-messages - missing, -body_bytes)  # they are read again
            return RangeResult(self.broker, *span, layout=self.layout_index, widen=files.builder.widen)
        return RangeResult(
            self.broker,
            *span,
            messages - files.builder.filtered - files.builder.discarded_rows - files.builder.dead_letters,
            body_bytes - files.builder.left_out_bytes,
            gaps=gaps,
            for_one_channel=for_one_channel,
            filtered=files.builder.filtered,
            unparsed=files.builder.unparsed,
            without_column=files.builder.without_column,
            misfits=dict(files.builder.misfits),
            milliseconds=dict(files.builder.milliseconds),
            new_fields=files.builder.new_fields,
            discarded=dict(files.builder.discarded),
            discarded_rows=files.builder.discarded_rows,
            dead_letters=files.builder.dead_letters,
            masked=dict(files.builder.masked),
            last_id=last_id,
            layout=self.layout_index,
        )


_shared: set[tuple[str, str]] = set()
"""The folders that this process has seen the manifest in, each with the id of the export."""


def _check_shared(storage: Storage, path: str, export_id: str) -> None:
    """Check, once in this process, that a folder has the manifest of the export. Raises StorageError.

    A worker on another machine writes elsewhere if the folder is not shared.
    """
    place = storage.url_of(path)
    if (place, export_id) in _shared:
        return
    found = storage.read(path)
    if found is None or Manifest.from_bytes(found.data).id != export_id:
        raise not_shared(storage.shown, f"the worker {os.uname().nodename} does not see its manifest")
    _shared.add((place, export_id))
