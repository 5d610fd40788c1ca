"""The task of an export: write one range to Parquet files, in this process or in a Spark worker."""

from dataclasses import dataclass, replace

from ...client.reading.batches import is_for_all_channels
from ...log.gaps import Gap, Span
from ..logs import LogPlace
from ..runtime.engine import Advance
from ..storage import Storage, storage_at
from .files import RangeFiles
from .layout import Layout
from .manifest import RangeResult, result_path
from .request import ExportRequest


@dataclass(frozen=True, slots=True)
class ExportTask:
    """A range to export. Can be pickled.

    Attributes:
        log: The log to read.
        layout_index: The index of the layout in the manifest.
    """

    request: ExportRequest
    layout: Layout
    log: LogPlace
    span: Span
    layout_index: int = 0

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
            OSError, StorageError: The files cannot be written.
        """
        storage = storage or storage_at(self.request.place)
        path = result_path(self.request.topic, self.broker, self.span)
        if (existing := storage.read(path)) is not None:
            return RangeResult.from_bytes(existing.data)
        files = RangeFiles(storage, self.request, self.layout, self.broker, self.span)
        try:
            result = self._write(files, advance)
            if result.widen:
                files.discard()
                return result
            files.publish()
        except BaseException:
            files.discard()
            raise
        result = replace(result, files=files.names, file_bytes=files.file_bytes)
        if not storage.put_new(path, result.to_bytes()) and (existing := storage.read(path)) is not None:
            return RangeResult.from_bytes(existing.data)  # of another attempt
        return result

    def _write(self, files: RangeFiles, advance: Advance | None) -> RangeResult:
        span = self.span
        gaps: list[tuple[int, int, str]] = []
        messages = body_bytes = for_one_channel = 0
        last_id = None
        for found in self.log.open().read(span):
            if isinstance(found, Gap):
                gaps.append((found.first_sequence, found.next_sequence, found.reason))
                continue
            count = found.count
            if found.next_sequence == span.end:
                last_id = f"{found.first_id + count - 1:016x}"
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
                advance(-messages, -body_bytes)  # they are read again
            return RangeResult(self.broker, *span, layout=self.layout_index, widen=files.builder.widen)
        return RangeResult(
            self.broker,
            *span,
            messages,
            body_bytes,
            gaps=gaps,
            for_one_channel=for_one_channel,
            unparsed=files.builder.unparsed,
            misfits=dict(files.builder.misfits),
            new_fields=files.builder.new_fields,
            last_id=last_id,
            layout=self.layout_index,
        )
