"""The command line of `qcli to-file` as one object, and its checks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...framework.errors import Failure
from ...framework.options import delimiter_of, given
from ...framework.params import byte_size
from ..shared.consuming import Consuming

if TYPE_CHECKING:
    from trio_nsq.connectors.to_file.compression import Compressor
    from trio_nsq.connectors.to_file.connector import ToFileOptions
    from trio_nsq.connectors.to_file.formats import Encoder

COMPRESSIONS = ("none", "gzip", "zstd")
MAX_LEVELS = {"gzip": 9, "zstd": 22}


def file_size(text: str) -> int:
    """Parse a size of files; 0 is no limit."""
    if (found := byte_size(text)) < 0:
        raise click.BadParameter(f"{text!r} is not a size such as 4096, 500MB or 10GiB, nor 0.")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class FileCommand:
    consuming: Consuming
    output_dir: Path
    work_dir: Path | None
    filename_format: str
    datetime_format: str
    host_identifier: str
    skip_empty_files: bool
    rotate_size: int
    rotate_interval_ms: int
    sync_interval_ms: int
    form: str
    framing: str
    separator: bytes
    null: bool
    compression: str | None
    compression_level: int | None
    gzip: bool
    gzip_level: int | None
    quiet: bool
    log_level: str
    log_prefix: str

    def options(self) -> ToFileOptions:
        """Return the options of the connector.

        Raises:
            UsageError: Options exclude each other.
            Failure: A library is not installed.
        """
        from trio_nsq.connectors.to_file.connector import ToFileOptions
        from trio_nsq.connectors.to_file.file_series import OutputSettings

        encode, extra_bytes, terminator = self._encoding()
        output_dir = self.output_dir.absolute()
        return ToFileOptions(
            output=OutputSettings(
                output_dir=output_dir,
                work_dir=self.work_dir.absolute() if self.work_dir else output_dir,
                encode=encode,
                extra_bytes=extra_bytes,
                terminator=terminator,
                compressor=self._compressor(),
                rotate_size=self.rotate_size,
                rotate_interval_s=self.rotate_interval_ms / 1000,
                skip_empty_files=self.skip_empty_files,
            ),
            filename_format=self.filename_format,
            datetime_format=self.datetime_format,
            host_identifier=self.host_identifier,
            sync_interval_s=self.sync_interval_ms / 1000,
        )

    def _encoding(self) -> tuple[Encoder, int, bytes | None]:
        """Return the encoder, the bytes that it adds to a body, and the end of each message."""
        from trio_nsq.connectors.to_file.formats import JSON_BYTES, as_json, delimited, length_prefixed

        delimiter = delimiter_of(self.separator, self.null)
        typed = given("separator", "null")
        if self.form == "json":
            if typed or self.framing != "delimiter":
                raise click.UsageError(
                    "--format json writes one object per line: leave out the delimiter and framing."
                )
            return as_json, JSON_BYTES, b"\n"
        if self.framing == "length":
            if typed:
                raise click.UsageError("--framing length has no delimiter: leave out --delimiter and --null.")
            return length_prefixed, 4, None
        return delimited(delimiter), len(delimiter), delimiter

    def _compressor(self) -> Compressor | None:
        from trio_nsq.connectors.to_file.compression import CompressionMissing, Compressor

        name = self.compression or ("gzip" if self.gzip else "none")
        if self.gzip and name != "gzip":
            raise click.UsageError(f"--gzip and --compression {name} exclude each other.")
        level = self.compression_level
        if level is None and name == "gzip":
            level = self.gzip_level
        if name == "none":
            if self.compression_level is not None:
                raise click.UsageError("--compression-level is for --compression gzip or zstd.")
            return None
        if level is not None and not 1 <= level <= MAX_LEVELS[name]:
            raise click.UsageError(f"Levels of {name} are 1 to {MAX_LEVELS[name]}, not {level}.")
        try:
            return Compressor(name, level)
        except CompressionMissing as error:
            raise Failure(f"{error}.") from error
