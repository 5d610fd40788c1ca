"""Read a topic by sequence or time, over HTTP (docs/how-to/read-and-replay.md). nsqd does not support this."""

import logging
import math
import random
import ssl
from types import TracebackType
from typing import Self, TypeGuard
from urllib.parse import urlencode

import trio

from ...log.gaps import gaps
from ...log.raw import RawStreamReader
from ...log.records import RecordBatch
from ...secret import Secret, StrPath
from ...under_trio import require_trio
from ...untrusted_json import decode_json
from ..connection.reconnect import MAX_DELAY_S, MIN_DELAY_S, ReconnectDelays
from ..errors import ConnectionFailed, RequestRefused
from .batches import Found, batches_and_gaps, has_gaps
from .http_stream import AnswerLost, StreamedAnswer, stream_get

CONNECT_TIMEOUT_S = 2.0
WAIT_S = 20
"""How long a request waits for messages. A new request at this interval detects a lost connection."""
_SILENCE_S = 30.0
"""The additional time that a broker may take: its disk may be slow."""
_HTTPS = "https://"
_MAX_SHORT_BYTES = 64 * 1024
_UNREADABLE = "the server is not an NSQ broker that supports reading by sequence"
_logger = logging.getLogger("trio_nsq.client")


class TopicReader:
    """Reads a range of a topic, or follows it; an async context manager.

        async with TopicReader("127.0.0.1:4151", "clicks", start="-1h") as reader:
            while found := await reader.receive():
                ...

    Reading does not affect any channel. If the connection is lost, the reader reconnects without limit and continues at
    its position: it neither skips nor repeats messages.

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
        self.first_sequence = self.start_sequence = self.position = 0
        self.end_sequence: int | None = None
        self.connections_lost = 0
        self.start_is_time = str(start).startswith(("-", "@"))
        self._address = nsqd_http_address.removeprefix(_HTTPS)
        self._topic = topic
        self._start = start
        self._end = end
        self._follow = follow
        self._left: float = math.inf if max_messages is None else max_messages
        if tls is None and nsqd_http_address.startswith(_HTTPS):
            tls = ssl.create_default_context()
        self._tls = tls
        self._secret = Secret(auth_secret, auth_secret_file)
        self._answer: StreamedAnswer | None = None
        self._decoder = RawStreamReader()
        self._began_at = 0  # first sequence of the current answer
        # The end of the range; None while following. If an answer for a range ends early, the rest of the range is
        # damaged and cannot be read.
        self._until: int | None = None
        self._delays = ReconnectDelays(reconnect_min_s, reconnect_max_s, random.random)
        self._failures = 0
        self._told_lost = False

    async def __aenter__(self) -> Self:
        """Connect and request the start of the range.

        Raises:
            ConnectionFailed: The broker cannot be reached, or the server is not a broker.
            RequestRefused: The topic does not exist, the broker refuses the token, or it does not support reading by
                sequence, like nsqd.
            RuntimeError: The caller is not a trio task.
        """
        require_trio("TopicReader")
        try:
            await self._ask(str(self._start), "latest" if self._end is None or self._follow else self._end)
        except OSError as exc:
            raise ConnectionFailed(self._address, exc.strerror or str(exc)) from exc
        except AnswerLost as exc:
            raise ConnectionFailed(self._address, str(exc)) from exc
        self.start_sequence = self.position
        # Sequences that retention has deleted are reported as a gap.
        if _is_sequence(self._start):
            self.position = min(int(self._start), self.position)
        # The broker's end is never before the oldest retained sequence; the requested end may be.
        if self._until is not None and not self._follow:
            if _is_sequence(self._end):
                self._until = max(self.position, min(int(self._end), self._until))
            self.end_sequence = self._until
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._drop_answer()

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
                    await self._ask(self.position, self._until)
                assert self._answer is not None
                if data := await self._answer.receive():
                    found = await self._take(data)
                else:
                    found = await self._end_answer()
            except (OSError, AnswerLost) as exc:
                await self._recover(exc)
                continue
            if found:
                self._failures = 0
                self._delays.reset()
                return found

    # ------------------------------------------------------------------ requests and answers

    async def _ask(self, start: int | str, end: int | str | None) -> None:
        query = {"topic": self._topic, "format": "raw", "from": str(start)}
        if end is None:
            query["wait"] = f"{WAIT_S}s"
        else:
            query["until"] = str(end)
        if self._left != math.inf:
            query["max_messages"] = str(max(1, int(self._left)))
        answer = await self._get("/topic/read", query)
        try:
            await self._begin(answer, start)
        except BaseException:
            await answer.aclose()
            raise

    async def _begin(self, answer: StreamedAnswer, start: int | str) -> None:
        try:
            self.first_sequence = int(answer.headers["x-nsq-first-sequence"])
            begins = int(answer.headers["x-nsq-start-sequence"])
            ends = answer.headers.get("x-nsq-end-sequence")
            if isinstance(start, str) and ends is not None:
                self._until = int(ends)
            elif self._follow and self._until is not None and ends is not None:
                # A restarted broker may have lost its last messages: that is not a gap.
                self._until = min(self._until, int(ends))
        except (KeyError, ValueError):
            raise AnswerLost(_UNREADABLE) from None
        if not isinstance(start, int):
            self.position = begins
        elif begins < start:
            _logger.warning(
                "%s: topic %s went back from sequence %d to %d", self._address, self._topic, start, begins
            )
            self.position = begins
            self._until = self.end_sequence
        self._answer, self._decoder, self._began_at = answer, RawStreamReader(), self.position
        if self._told_lost:
            self._told_lost = False
            _logger.info("connected to %s", self._address)

    async def _get(self, path: str, query: dict[str, str]) -> StreamedAnswer:
        answer = await stream_get(
            self._address,
            f"{path}?{urlencode(query)}",
            connect_timeout_s=CONNECT_TIMEOUT_S,
            silence_s=WAIT_S + _SILENCE_S,
            tls=self._tls,
            secret=self._secret,
        )
        if answer.status == 200:
            return answer
        body = await self._read_and_close(answer)
        try:
            text = str(decode_json(body)["message"])
        except (ValueError, KeyError, TypeError):
            raise AnswerLost(f"the server is not an NSQ broker (HTTP status {answer.status})") from None
        if text == "AUTH_UNAVAILABLE":
            raise AnswerLost("its auth servers do not answer")
        raise RequestRefused(self._address, self._topic, answer.status, text)

    async def _read_and_close(self, answer: StreamedAnswer) -> bytes:
        """Read a short answer. Stops at a limit, in case the server is not a broker."""
        body = b""
        try:
            while (piece := await answer.receive()) and len(body) < _MAX_SHORT_BYTES:
                body += piece
        finally:
            await answer.aclose()
        return body

    async def _take(self, data: bytes) -> list[Found]:
        batches = [batch for batch in self._decoder.receive_data(data) if batch.next_sequence > self.position]
        if has_gaps(batches, self.position):
            try:
                await self._update_first_sequence()
            except BaseException:
                await self._drop_answer()  # its data was not returned; request it again
                raise
        found = batches_and_gaps(batches, self.position, self._until, self.first_sequence)
        if found:
            self.position = found[-1].next_sequence
            self._left -= sum(each.count for each in found if isinstance(each, RecordBatch))
        return found

    async def _end_answer(self) -> list[Found]:
        """Handle the end of a complete answer."""
        self._decoder.end()
        await self._drop_answer()
        if self._until is None or self.position > self._began_at:
            return []
        await self._update_first_sequence()
        # The rest of the range has no messages.
        missing: list[Found] = [*gaps(self.position, self._until, self.first_sequence)]
        self.position = max(self.position, self._until)
        return missing

    async def _drop_answer(self) -> None:
        if self._answer is not None:
            answer, self._answer = self._answer, None
            await answer.aclose()

    async def _recover(self, error: OSError | AnswerLost) -> None:
        """Wait before the next attempt, except after the first failure: the client itself may have been too slow."""
        await self._drop_answer()
        self.connections_lost += 1
        self._failures += 1
        if self._failures == 2:
            self._told_lost = True
            reason = error.strerror or str(error) if isinstance(error, OSError) else str(error)
            _logger.warning("lost the connection to %s: %s; reconnecting", self._address, reason)
        if self._failures > 1:
            await trio.sleep(self._delays.next_s())

    async def _update_first_sequence(self) -> None:
        """Request the oldest retained sequence: retention may have deleted the missing messages meanwhile."""
        answer = await self._get("/topic/bounds", {"topic": self._topic})
        try:
            self.first_sequence = int(decode_json(await self._read_and_close(answer))["first_sequence"])
        except (ValueError, KeyError, TypeError):
            raise AnswerLost(_UNREADABLE) from None


def _is_sequence(position: int | str | None) -> TypeGuard[int | str]:
    return isinstance(position, int) or (position is not None and position.isdecimal())
