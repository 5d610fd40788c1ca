"""The values of the options of `to-http`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trio_nsq.text.wording import printable

from ...framework.errors import ExitCode, Failure, reason_of
from ...framework.options import given
from ..shared.consuming import Consuming

if TYPE_CHECKING:
    from trio_nsq.connectors.source.options import SourceOptions
    from trio_nsq.connectors.to_http.options import Batching, DeliveryOptions
    from trio_nsq.connectors.to_http.sender import SenderSettings
    from trio_nsq.connectors.to_http.templates import HeaderTemplate, URLTemplate

MODES = ("hostpool", "round-robin", "epsilon-greedy", "all")
MAX_HEADER_FILE_BYTES = 64 * 1024
BROKERS_MAX_IN_FLIGHT = 2500
_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_OURS = ("content-length", "transfer-encoding", "connection")


def http_status(text: str) -> range:
    """Parse a status, or a class of statuses such as `4xx`."""
    found = re.fullmatch(r"([1-5])(xx|[0-9]{2})", text.lower())
    if found is None:
        raise click.BadParameter(f"{text!r} is not an HTTP status such as 404, nor a class such as 4xx.")
    if found[1] in "12":
        raise click.BadParameter(
            f"{text!r}: a status from 200 to 299 is always a success, and from 100 no result."
        )
    if found[2] == "xx":
        return range(int(found[1]) * 100, int(found[1]) * 100 + 100)
    return range(int(text), int(text) + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToHttpOptions:
    consuming: Consuming
    post: Sequence[str]
    put: Sequence[str]
    get: Sequence[str]
    mode: str
    follow_redirects: bool
    receiver_tls_root_ca_file: str | None
    receiver_tls_cert: str | None
    receiver_tls_key: str | None
    receiver_tls_insecure_skip_verify: bool
    headers: Sequence[str]
    content_type: str | None
    concurrency: int
    connect_timeout_ms: int
    request_timeout_ms: int
    sample: float
    batch_size: int
    batch_format: str | None
    batch_bytes: int
    batch_wait_ms: int
    with_metadata: bool
    retried: Sequence[range]
    final: Sequence[range]
    max_attempts: int
    dead_letter_topic: str | None
    retry_delay_ms: int
    max_retry_delay_ms: int
    max_retry_after_ms: int
    status_every: int
    quiet: bool

    @property
    def is_batched(self) -> bool:
        """Whether requests have the form of several messages."""
        return self.batch_size > 1 or self.batch_format is not None or self.with_metadata

    def source_options(self) -> SourceOptions:
        """Return what to consume. Raises UsageError: a topic is the dead-letter topic, or as `Consuming`."""
        options = self.consuming.source_options()
        topic = self.dead_letter_topic
        if topic in options.topics:
            raise click.UsageError(
                f"--dead-letter-topic {topic}: its messages would be sent again and again."
            )

        def is_dead_letter_topic(name: str) -> bool:
            return name == topic if topic else name.endswith(".dead")

        wanted = min(BROKERS_MAX_IN_FLIGHT, max(options.max_in_flight, 4 * self.batch_size))
        if self.batch_size > 1 and not given("max_in_flight"):
            options = dataclasses.replace(options, max_in_flight=wanted)
        return dataclasses.replace(options, left_out=is_dead_letter_topic)

    def delivery_options(self) -> DeliveryOptions:
        """Return how to deliver. Raises UsageError: the options contradict each other, or a value is wrong."""
        from trio_nsq.connectors.host_pool import Mode
        from trio_nsq.connectors.to_http.options import DeliveryOptions
        from trio_nsq.connectors.to_http.outcomes import RetryDelays

        method, urls = self._receivers()
        headers = tuple(self._headers())
        if method == "GET" and (self.is_batched or self.content_type is not None):
            raise click.UsageError("--get sends no content: leave --content-type and the batch options out.")
        if self.content_type is not None and not re.fullmatch(
            r"[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?", self.content_type
        ):
            raise click.UsageError(f"--content-type {self.content_type!r} is not a media type.")
        if self.is_batched:
            self._check_batch_fields(urls, headers)
        attempts = self.consuming.max_attempts
        return DeliveryOptions(
            method=method,
            urls=urls,
            sender=self._sender(),
            headers=headers,
            content_type=self.content_type,
            mode=None if self.mode == "all" else Mode(self.mode),
            concurrency=self.concurrency,
            sample=self.sample,
            batching=self._batching(),
            delays=RetryDelays(
                self.retry_delay_ms / 1000, max(self.retry_delay_ms, self.max_retry_delay_ms) / 1000
            ),
            max_attempts=self.max_attempts if attempts is None or given("max_attempts") else attempts,
            max_retry_after_s=self.max_retry_after_ms / 1000,
            dead_letter_topic=self.dead_letter_topic,
            status_every=self.status_every,
        )

    def _receivers(self) -> tuple[str, tuple[URLTemplate, ...]]:
        from trio_nsq.connectors.to_http.templates import TemplateError, URLTemplate

        chosen = [(name, urls) for name in ("post", "put", "get") if (urls := getattr(self, name))]
        if not chosen:
            raise click.UsageError("Missing option '--post', '--put' or '--get': name a receiver's URL.")
        if len(chosen) > 1:
            names = " and ".join(f"--{name}" for name, _ in chosen)
            raise click.UsageError(
                f"{names} exclude each other. Run a command for each, with its own --channel."
            )
        ((name, urls),) = chosen
        found = []
        for url in urls:
            try:
                template = URLTemplate(url, printf=name == "get")
            except TemplateError as error:
                raise click.UsageError(f"--{name}: {error}.") from None
            if name == "get" and not template.fields:
                raise click.UsageError(
                    f"--get: {template.label!r} has no placeholder, so the receiver would not get the "
                    "message. Write %s for the body."
                )
            found.append(template)
        return name.upper(), tuple(found)

    def _headers(self) -> list[tuple[str, HeaderTemplate]]:
        from trio_nsq.connectors.to_http.templates import HeaderTemplate, TemplateError

        lines = []
        for given_ in self.headers:
            if given_.startswith("@"):
                lines += [(f"--header {given_}", line) for line in _lines(given_[1:])]
            else:
                name, colon, _ = given_.partition(":")
                lines.append((f"--header '{printable(name)}: ...'" if colon else "--header", given_))
        found = []
        for where, line in lines:
            name, colon, value = (part.strip() for part in line.partition(":"))
            if not colon or not _TOKEN.fullmatch(name) or not value:
                shown = "a line" if where.startswith("--header @") else "a value"
                raise click.UsageError(f"{where}: {shown} is not 'Name: value'.")
            if name.lower() in _OURS:
                raise click.UsageError(f"{where}: {name} is set by this command.")
            try:
                found.append((name, HeaderTemplate(value)))
            except TemplateError as error:
                raise click.UsageError(f"{where}: {error}.") from None
        return found

    def _check_batch_fields(
        self, urls: Sequence[URLTemplate], headers: Sequence[tuple[str, HeaderTemplate]]
    ) -> None:
        from trio_nsq.connectors.to_http.templates import MESSAGE_FIELDS

        used = frozenset[str]().union(*(url.fields for url in urls), *(each.fields for _, each in headers))
        if wrong := sorted(used.intersection(MESSAGE_FIELDS)):
            raise click.UsageError(
                f"{{{{{wrong[0]}}}}} is of one message, and a request with --batch-size has several. "
                "Use --with-metadata to send it in the content."
            )

    def _batching(self) -> Batching:
        from trio_nsq.connectors.to_http.options import Batching
        from trio_nsq.connectors.to_http.payloads import PayloadFormat

        form = PayloadFormat(self.batch_format or "json") if self.is_batched else None
        return Batching(
            self.batch_size, self.batch_bytes, self.batch_wait_ms / 1000, form, self.with_metadata
        )

    def _sender(self) -> SenderSettings:
        from trio_nsq.client.connection.tls import TLSFiles, TLSFilesError
        from trio_nsq.connectors.to_http.outcomes import StatusRules
        from trio_nsq.connectors.to_http.sender import SenderSettings

        if self.receiver_tls_key and not self.receiver_tls_cert:
            raise click.UsageError("--receiver-tls-key needs a certificate: give --receiver-tls-cert, too.")
        files = TLSFiles(
            self.receiver_tls_root_ca_file,
            self.receiver_tls_cert,
            self.receiver_tls_key,
            self.receiver_tls_insecure_skip_verify,
        )
        try:
            tls = files.context()
        except TLSFilesError as error:
            text = re.sub(
                r"\btls_(\w+)", lambda found: "--receiver-tls-" + found[1].replace("_", "-"), str(error)
            )
            raise Failure(f"{text}.") from error
        retried, final = (
            {status for each in kinds for status in each} for kinds in (self.retried, self.final)
        )
        if both := sorted(retried & final):
            raise click.UsageError(f"--retry-status and --final-status both name {both[0]}.")
        return SenderSettings(
            tls,
            self.connect_timeout_ms / 1000,
            self.request_timeout_ms / 1000,
            StatusRules(frozenset(retried), frozenset(final)),
            self.follow_redirects,
        )


def _lines(path: str) -> list[str]:
    """Return the lines of a file of headers. Raises Failure."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_HEADER_FILE_BYTES + 1)
        if len(data) > MAX_HEADER_FILE_BYTES:
            raise Failure(
                f"--header @{path}: it has more than {MAX_HEADER_FILE_BYTES:,} bytes.", ExitCode.USAGE
            )
        text = data.decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else reason_of(error)
        raise Failure(f"--header @{path}: {reason}.", ExitCode.USAGE) from error
    return [line for line in text.splitlines() if line.strip()]
