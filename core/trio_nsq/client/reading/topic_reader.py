"""Read a topic by sequence or time, over HTTP (docs/how-to/read-and-replay.md). nsqd does not support this."""

import logging
import math
import random
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from trio_nsq.event_loop.retries import reconnect_delays
from trio_nsq.text.arguments import MAX_INT, check_int, check_type

from ...access.secret import Secret, SecretFileError, StrPath
from ...api import broker as api
from ...api.request import Procedure, Request, message_of, perform
from ...event_loop import runtime
from ...event_loop.retries import MAX_DELAY_S, MIN_DELAY_S
from ...http.client import HEADERS, Answer, HTTPClient, NotHTTP, RequestFailed
from ...http.urls import URL
from ...log.positions import sequence_of
from ...log.records import RecordBatch
from ...protocol import NSQError
from ...protocol.address import is_unix_path
from ...protocol.untrusted_json import decode_json
from ..arguments import check_name
from ..errors import WRONG_PORT, ConnectionFailed, RequestRefused
from .log_stream import Found, LogStream

CONNECT_TIMEOUT_S = 2.0
WAIT_S = 20
"""How long a request waits for messages. A new request at this interval detects a lost connection."""
SILENCE_S = WAIT_S + 30.0
"""The longest time without data: the disk of a broker may be slow."""
_HTTPS = "https://"
_MAX_SHORT_BYTES = 64 * 1024
_UNREADABLE = "the server is not an NSQ broker that supports reading by sequence"
_FAILURES = (RequestFailed, SecretFileError)
_logger = logging.getLogger("trio_nsq.client")


class AnswerSilent(RequestFailed):
    """The connection is open, but no data arrived in time."""


class NoLogs(RequestFailed):
    """The server answers, and is not a broker with logs."""


class TopicReader:
    """Reads a range of a topic, or follows it; an async context manager.

        async with TopicReader("127.0.0.1:4151", "clicks", start="-1h") as reader:
            while found := await reader.receive():
                ...

    Reading does not affect any channel. If the connection is lost, the reader reconnects without limit and continues at
    its position: it neither skips nor repeats messages. If the log has another message there than before, such as after
    a restore of the broker that lacks the last messages, a warning is logged: other messages have sequences that were
    read, and are not read.

    Args:
        nsqd_http_address: The broker: `host:port`, `https://host:port`, or the path of a unix socket.
        topic: The topic.
        start: The first sequence; or `earliest`, `latest`, `-1h30m`, `@TIME`, see docs/how-to/read-and-replay.md.
        end: The sequence after the last, or one of the other forms; None: the current end of the topic.
        follow: Continue with messages that are published later, without end; `end` is ignored.
        max_messages: The approximate number of messages to read; a few more may be returned.
        tls: For https; also makes `host:port` https. None: http, or for `https://` the system's CAs.
        auth_secret, auth_secret_file: The token for a broker that requires authentication, or the file that has it; it
            needs the role `read` on the topic. See `ConnectionSettings`.
        reconnect_min_s: The first delay before reconnecting, more than 0.
        reconnect_max_s: The longest delay before reconnecting; delays double.

    Attributes:
        first_sequence: The oldest retained sequence, as of the last request.
        start_is_time: Whether `start` is a time.
        start_sequence: The sequence of `start`.
        end_sequence: The sequence of `end`; None with `follow`.
        position: The next sequence to read.
        connections_lost: How often a connection was lost. The log of a broker that was restarted may lack messages that
            it had.

    Raises:
        TypeError: An argument has another type.
        ValueError: The name of the topic or a number is invalid.
    """

    def __init__(
        self,
        nsqd_http_address: str,
        topic: str,
        *,
        start: int | str = "earliest",
        end: int | str | None = None,
        follow: bool = False,
        max_messages: int | None = None,
        tls: ssl.SSLContext | None = None,
        auth_secret: str = "",
        auth_secret_file: StrPath | None = None,
        reconnect_min_s: float = MIN_DELAY_S,
        reconnect_max_s: float = MAX_DELAY_S,
    ) -> None:
        check_type("nsqd_http_address", nsqd_http_address, str)
        check_name("topic", topic)
        for name, value in (("start", start), ("end", "" if end is None else end)):
            if not isinstance(value, str):
                check_int(name, value, 0, MAX_INT)
        if max_messages is not None:
            check_int("max_messages", max_messages, 0)
        check_type("follow", follow, bool)
        check_type("tls", tls, ssl.SSLContext | None)
        self.first_sequence: int = 0
        self.start_sequence: int = 0
        self.position: int = 0
        self.end_sequence: int | None = None
        self.connections_lost: int = 0
        self.start_is_time: bool = str(start).startswith(("-", "@"))
        self._address = nsqd_http_address.removeprefix(_HTTPS)
        self._is_path = is_unix_path(self._address)
        self._is_secure = not self._is_path and (tls is not None or nsqd_http_address.startswith(_HTTPS))
        self._topic = topic
        self._start = start
        self._end = end
        self._follow = follow
        self._left: float = math.inf if max_messages is None else max_messages
        self._http = HTTPClient(
            connect_timeout_s=CONNECT_TIMEOUT_S,
            request_timeout_s=SILENCE_S,
            max_answer_bytes=_MAX_SHORT_BYTES,
            tls=tls,
        )
        self._secret = Secret(auth_secret, auth_secret_file)
        self._answer: tuple[Answer, LogStream] | None = None
        self._began_at = 0  # first sequence of the current answer
        # The end of the range; None while following. If an answer for a range ends early, the rest of the range is
        # damaged and cannot be read.
        self._until: int | None = None
        self._delays = reconnect_delays(reconnect_min_s, reconnect_max_s, random.random)
        self._failures = 0
        self._told_lost = False
        self._last: tuple[int, str] | None = None  # the sequence and the id of the last message that was read
        self._compares = False  # the next answer begins with the last message

    async def __aenter__(self) -> Self:
        """Connect and request the start of the range.

        Raises:
            ConnectionFailed: The broker cannot be reached, or the server is not a broker.
            RequestRefused: The topic does not exist, the broker refuses the token, or it does not support reading by
                sequence, like nsqd.
            RuntimeError: The caller is not a task of trio or asyncio.
        """
        runtime.require_task("TopicReader")
        try:
            await self._ask(str(self._start), "latest" if self._end is None or self._follow else self._end)
        except _FAILURES as exc:
            raise ConnectionFailed(self._address, str(exc)) from exc
        self.start_sequence = self.position
        # Sequences that retention has deleted are reported as a gap.
        if (start := _sequence_of(self._start)) is not None:
            self.position = min(start, self.position)
        # The broker's end is never before the oldest retained sequence; the requested end may be.
        if self._until is not None and not self._follow:
            if (end := _sequence_of(self._end)) is not None:
                self._until = max(self.position, min(end, self._until))
            self.end_sequence = self._until
        if self._answer is not None:
            self._answer[1].position, self._answer[1].end = self.position, self._until
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._drop_answer()
        finally:
            await runtime.shielded(self._http.aclose)  # after cancelled requests, it may have connections

    async def receive(self) -> list[Found]:
        """Receive the next batches and gaps, at least one; an empty list at the end. Cancelling loses nothing.

        Raises:
            RequestRefused: The topic was deleted, or the token was revoked.
            RawStreamError: The received data is corrupt.
        """
        while True:
            try:
                if self._until is not None and self.position >= self._until:
                    if not self._follow:
                        return []
                    self._until = None
                    await self._drop_answer()
                if self._answer is None:
                    await self._continue()
                assert self._answer is not None
                answer, stream = self._answer
                if data := await self._receive(answer):
                    found = await self._perform(stream, stream.receive(data))
                else:
                    found = await self._end_answer(stream)
            except _FAILURES as exc:
                await self._recover(exc)
                continue
            if found:
                self._failures = 0
                self._delays.reset()
                return found

    # ------------------------------------------------------------------ requests and answers

    async def _continue(self) -> None:
        """Ask for the rest; after a lost connection also for the last message, to see whether it is the same log."""
        known = self._last if self._compares else None
        if known is None or known[0] + 1 != self.position:
            await self._ask(self.position, self._until)
        else:
            await self._ask(self.position, self._until, known)
        self._compares = False

    async def _ask(
        self, start: int | str, end: int | str | None, known: tuple[int, str] | None = None
    ) -> None:
        waits = f"{WAIT_S}s" if end is None else None
        most = None if self._left == math.inf else max(1, int(self._left)) + (known is not None)
        first = start if known is None else known[0]
        answer = await self._get(api.log(self._topic, first, end, "raw", waits, most))
        try:
            await self._begin(answer, start, known)
        except BaseException:
            await answer.aclose()
            raise

    async def _begin(self, answer: Answer, start: int | str, known: tuple[int, str] | None) -> None:
        try:
            stream = LogStream(self._topic, answer.headers.get)
        except ValueError:
            raise NoLogs(_UNREADABLE) from None
        self.first_sequence, begins, ends = stream.kept_from, stream.begins, stream.ends
        if isinstance(start, str) and ends is not None:
            self._until = ends
        elif self._follow and self._until is not None and ends is not None:
            # A restarted broker may have lost its last messages: that is not a gap.
            self._until = min(self._until, ends)
        if not isinstance(start, int):
            self.position = begins
        elif begins < (start if known is None else known[0]):
            _logger.warning(
                "%s: topic %s went back from sequence %d to %d", self._address, self._topic, start, begins
            )
            self.position = begins
            self._until = self.end_sequence
        stream.position, stream.end, stream.known = self.position, self._until, known
        self._answer, self._began_at = (answer, stream), self.position
        if self._told_lost:
            self._told_lost = False
            _logger.info("connected to %s", self._address)

    async def _get(self, request: Request[Any]) -> Answer:
        scheme, host = "https" if self._is_secure else "http", "localhost" if self._is_path else self._address
        url = URL.parse(f"{scheme}://{host}{request.target}")
        headers = HEADERS | self._secret.headers("" if self._is_secure or self._is_path else self._address)
        with _limited():
            answer = await self._http.start(
                request.method, url, headers, unix_path=self._address if self._is_path else ""
            )
        if answer.status == 200:
            return answer
        body = await self._read_and_close(answer)
        if not (text := message_of(body)):
            raise NoLogs(f"the server is not an NSQ broker (HTTP status {answer.status})")
        if text == "AUTH_UNAVAILABLE":
            raise RequestFailed("its auth servers do not answer")
        raise RequestRefused(self._address, self._topic, answer.status, text)

    async def _read_and_close(self, answer: Answer) -> bytes:
        try:
            with _limited():
                return await self._http.read(answer)
        finally:
            await answer.aclose()

    async def _receive(self, answer: Answer) -> bytes:
        try:
            with _limited():
                return await answer.receive()
        except BaseException:
            await self._drop_answer()  # it does not go on after a cancellation
            raise

    async def _perform(self, stream: LogStream, procedure: Procedure[list[Found]]) -> list[Found]:
        try:
            found = await perform(procedure, self._make)
        except BaseException:
            await self._drop_answer()  # its data was not returned; request it again
            raise
        self.first_sequence, self.position = stream.kept_from, stream.position
        if stream.is_another:
            stream.is_another = False
            _logger.warning(
                "%s: topic %s has another message than before at sequence %d: it was recreated, or lost its last "
                "messages. Other messages have sequences before, and are not read",
                *(self._address, self._topic, self._last[0] if self._last is not None else 0),
            )
        for each in found[-1:]:
            if isinstance(each, RecordBatch):
                self._last = each.next_sequence - 1, each.id_of(each.next_sequence - 1)
        self._left -= sum(each.count for each in found if isinstance(each, RecordBatch))
        return found

    async def _end_answer(self, stream: LogStream) -> list[Found]:
        stream.finish()
        await self._drop_answer()
        # If there was nothing, the rest of the range has no messages.
        return [] if self.position > self._began_at else await self._perform(stream, stream.missing())

    async def _drop_answer(self) -> None:
        if self._answer is not None:
            (answer, _), self._answer = self._answer, None
            await answer.aclose()

    async def _recover(self, error: NSQError) -> None:
        """Wait before the next attempt, except after the first failure: the client itself may have been too slow."""
        await self._drop_answer()
        self.connections_lost += 1
        self._compares = True
        self._failures += 1
        if self._failures == 2:
            self._told_lost = True
            _logger.warning("lost the connection to %s: %s; reconnecting", self._address, error)
        if self._failures > 1:
            await runtime.sleep(self._delays.next_s())

    async def _make(self, request: Request[Any]) -> Any:
        """Make a request with a short answer."""
        body = await self._read_and_close(await self._get(request))
        try:
            return request.read(body, decode_json)
        except ValueError:
            raise NoLogs(_UNREADABLE) from None


@contextmanager
def _limited() -> Iterator[None]:
    """Limit how long a broker sends nothing. Raises AnswerSilent, and NotHTTP with advice."""
    try:
        with runtime.fail_after(SILENCE_S):
            yield
    except runtime.TooSlowError:
        raise AnswerSilent(f"no data for {SILENCE_S:g} s") from None
    except NotHTTP as exc:
        raise NotHTTP(f"the answer is not HTTP. {WRONG_PORT}") from exc


def _sequence_of(position: int | str | None) -> int | None:
    return sequence_of(position) if isinstance(position, str) else position
