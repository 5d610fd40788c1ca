"""SUB on a shared port: one client that consumes a channel of all processes of a node.

The process that accepted the client subscribes at each process, itself included, over unix sockets. It divides the
client's RDY among them, and sends FIN, REQ and TOUCH to the process that has the message.
"""

import logging
import random
import socket
from contextlib import suppress
from dataclasses import asdict
from itertools import groupby
from struct import Struct
from typing import Final

import trio

from ...event_loop.reactor import SendBuffer
from ...event_loop.retries import Delays
from ...protocol import CommandError
from ...protocol.bulk import COMPILED, MAX_INT32, split_frames
from ...protocol.commands import Command, Finish, Ready, Requeue, StartClose, Touch
from ...protocol.encode import encode_identify, encode_rdy, encode_sub
from ...protocol.frames import CLOSE_WAIT_FRAME, FrameType, encode_error, unpack_frames
from ...protocol.limits import MAGIC_V2
from ...protocol.states import State
from ..siblings import Siblings
from .session import Session

logger: logging.Logger = logging.getLogger("trio_nsq.broker")

PREAMBLE_BYTES: Final = 64
"""An internal connection begins with the client's address, filled up with blanks."""
_HEAD: Final = Struct(">ii")
_ID_AT, _ID_END = 18, 34
_RECEIVE_BYTES: Final = 256 * 1024
_BEGIN_S: Final = 5.0
"""A process that has not subscribed within this time is tried again later, without the client waiting for it."""
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.1, 2.0
_TURN_S: Final = 0.25
"""If there are more processes than places, one without messages in flight gives its place away after this time."""
_LONGEST_TURNS: Final = 4
"""And one that always has some after so many of these times, as soon as it has none."""
_LATE_S: Final = 1.0
"""A message counts as in flight for so long after its timeout: the other process may be late."""
_split_frames = split_frames if COMPILED else unpack_frames
_NOT_PASSED_ON: Final = (
    *("tls_v1", "snappy", "deflate", "deflate_level", "producer", "producer_instance"),
    *("heartbeat_interval", "survive_refusals"),
)


class _Place:
    """The subscription at one process.

    Attributes:
        buffer: To send commands; None: it is not subscribed now.
        ready: The RDY that it has.
        in_flight: When each message came from it, or was touched, by trio's clock; oldest first.
        turns: For how many turns it has had its only place.
        starts: How often the process had been started when it was subscribed; 0: it was not yet.
        settled: Set when it is subscribed for the first time, or cannot be now.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.buffer: SendBuffer | None = None
        self.ready = 0
        self.in_flight: dict[bytes, float] = {}
        self.turns = 0
        self.starts = 0
        self.settled = trio.Event()

    def put(self, command: bytes) -> None:
        """Add a command; without effect if it is not subscribed: it delivers again what it had in flight."""
        if self.buffer is not None:
            self.buffer.put(command)

    def flush(self) -> None:
        """Send the commands now: the client may leave after them."""
        if self.buffer is not None:
            self.buffer.flush()


class SharedSubscription:
    """A subscription at all processes, for one session.

    At a change of turns, a message more than the client's RDY may be in flight.
    """

    def __init__(self, session: Session, siblings: Siblings, topic: str, channel: str) -> None:
        self._session = session
        self._siblings = siblings
        self._places = [_Place(index) for index in range(siblings.count)]
        self._place_of: dict[bytes, _Place] = {}  # of each message in flight
        self._ready = 0
        self._next = 0  # the place that is next to get a RDY of 1
        self._refusals: list[CommandError] = []
        identity = asdict(session.handshake.identity)
        kept = {name: value for name, value in identity.items() if value and name not in _NOT_PASSED_ON}
        self._opening = (
            session.peer.encode()[:PREAMBLE_BYTES].ljust(PREAMBLE_BYTES)
            + MAGIC_V2
            + encode_identify({**kept, "feature_negotiation": True})
            + encode_sub(topic, channel)
        )

    # ------------------------------------------------------------------ connections

    async def begin(self, nursery: trio.Nursery) -> None:
        """Subscribe, and go on until the nursery is cancelled.

        Raises:
            CommandError: A process refuses.
        """
        for place in self._places:
            nursery.start_soon(self._serve, place)
        with trio.move_on_after(_BEGIN_S):
            for place in self._places:
                await place.settled.wait()
        if self._refusals:
            raise self._refusals[0]
        nursery.start_soon(self._take_turns)

    async def _serve(self, place: _Place) -> None:
        """Be subscribed at a process, also after it has started again."""
        delays = Delays(_FIRST_DELAY_S, _LONGEST_DELAY_S, random.random)
        while not self._session.send_buffer.broken:
            began_s = trio.current_time()
            try:
                await self._serve_once(place)
            except CommandError as exc:
                if not place.settled.is_set():
                    self._refusals.append(exc)
                logger.warning("[%s] - process %d: %s", self._session.peer, place.index, exc)
            except (OSError, trio.BrokenResourceError):
                pass
            finally:
                self._lose(place)
            place.settled.set()
            delays.connection_lasted(trio.current_time() - began_s)
            await trio.sleep(delays.next_s())

    async def _serve_once(self, place: _Place) -> None:
        """Subscribe at a process, and pass on frames until the connection ends.

        Raises:
            CommandError: It refuses.
            OSError, trio.BrokenResourceError: It does not answer.
        """
        if not self._siblings.is_ready(place.index):
            return  # its listener would accept the connection only when it has started again
        starts = self._siblings.counts.starts(place.index)
        if place.starts == starts:
            # It has not ended, so it has closed the connection on purpose, as when the channel is deleted.
            self._session.close()
            return
        received = b""
        connected = await trio.open_unix_socket(self._siblings.tcp_paths[place.index])
        sock = socket.socket(fileno=connected.socket.detach())
        sock.setblocking(False)
        async with trio.SocketStream(trio.socket.from_stdlib_socket(sock)) as stream:
            await stream.send_all(self._opening)
            for _ in ("IDENTIFY", "SUB"):
                while (frame := _frame_at(received, 0)) is None:
                    data = await stream.receive_some(_RECEIVE_BYTES)
                    if not data:
                        return
                    received += data
                kind, end = frame
                content, received = received[_HEAD.size : end], received[end:]
                if kind == FrameType.ERROR:
                    code, _, text = content.decode(errors="backslashreplace").partition(" ")
                    raise CommandError(code, text)
            place.starts = starts
            buffer = place.buffer = SendBuffer(sock)
            place.settled.set()
            self._spread()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_send_rest, buffer)
                await self._receive(place, stream, received)
                nursery.cancel_scope.cancel()

    async def _receive(self, place: _Place, stream: trio.SocketStream, received: bytes) -> None:
        with suppress(trio.BrokenResourceError):
            while True:
                pieces = [self._pass_on(place, received)]
                await self._session.send_buffer.emptied()
                missing = _missing_bytes(pieces[0])
                while missing > 0:  # joined once: a large message arrives in many pieces
                    data = await stream.receive_some(_RECEIVE_BYTES)
                    if not data:
                        return
                    pieces.append(data)
                    missing -= len(data)
                received = b"".join(pieces)

    def _lose(self, place: _Place) -> None:
        """Forget what a process had in flight: it delivers these messages again."""
        place.buffer = None
        place.ready = 0
        for message_id in place.in_flight:
            self._place_of.pop(message_id, None)
        place.in_flight.clear()
        self._spread()

    def _pass_on(self, place: _Place, data: bytes) -> bytes:
        """Pass the complete frames on to the client, and answer heartbeats. Returns what follows them."""
        buffer = self._session.send_buffer
        view, start = memoryview(data), 0
        while True:
            ids: list[bytes] = []
            end = _split_frames(data, start, MAX_INT32, ids, [], [], [])
            if ids:
                self._note(place, ids)
                buffer.put(view[start:end])
                start = end
            frame = _frame_at(data, start)
            if frame is None:
                break
            kind, end = frame
            if kind == FrameType.MESSAGE_WITH_HEADERS:
                self._note(place, [data[start + _ID_AT : start + _ID_END]])
                buffer.put(view[start:end])
            elif kind == FrameType.ERROR:
                buffer.put(view[start:end])
            elif data[start + _HEAD.size : end] == b"_heartbeat_":
                place.put(b"NOP\n")
                place.flush()
            start = end
        buffer.flush()
        return data[start:]

    def _note(self, place: _Place, ids: list[bytes]) -> None:
        """Note messages that are in flight now."""
        if not place.in_flight.keys().isdisjoint(ids):
            for message_id in ids:
                place.in_flight.pop(message_id, None)  # it timed out, and is delivered again
        place.in_flight.update(dict.fromkeys(ids, trio.current_time()))
        self._place_of.update(dict.fromkeys(ids, place))

    # ------------------------------------------------------------------ commands of the client

    def execute(self, command: Command) -> None:
        """Execute a command of the subscribed client."""
        if isinstance(command, Finish):
            for place, ids in groupby(command.ids, self._place_of.get):
                self._answer("FIN", place, list(ids))
            self._flush()
        elif isinstance(command, Ready):
            if self._session.reader.state is not State.CLOSING:
                self._ready = command.count
                self._spread()
        elif isinstance(command, Requeue):
            more = b" %d%s" % (command.delay_ms, b"" if command.counts_attempt else b" uncounted")
            self._answer("REQ", self._place_of.get(command.id), [command.id], more)
            self._flush()
        elif isinstance(command, Touch):
            place = self._place_of.get(command.id)
            if place is None:
                self._refuse("TOUCH", command.id)
            else:
                del place.in_flight[command.id]
                place.in_flight[command.id] = trio.current_time()
                place.put(b"TOUCH %s\n" % command.id)
                place.flush()
        elif isinstance(command, StartClose):
            self._session.reader.state = State.CLOSING
            self._ready = 0
            self._spread()
            self._session.answer(CLOSE_WAIT_FRAME)

    def _flush(self) -> None:
        for place in self._places:
            place.flush()

    def _answer(self, verb: str, place: _Place | None, ids: list[bytes], more: bytes = b"") -> None:
        """Send FIN or REQ for messages of a process; None: they are not in flight."""
        if place is None:
            for message_id in ids:
                self._refuse(verb, message_id)
            return
        for message_id in ids:
            if self._place_of.pop(message_id, None) is not None:  # else twice in a run, and refused there
                del place.in_flight[message_id]
        if not place.in_flight and place.turns >= _LONGEST_TURNS:
            self._give_away(place)  # before the lines, which would bring the next message
        start, end = verb.encode() + b" ", more + b"\n"
        place.put(start + (end + start).join(ids) + end)

    def _refuse(self, verb: str, message_id: bytes) -> None:
        text = b"E_%s_FAILED %s %s failed ID not in flight" % (verb.encode(), verb.encode(), message_id)
        self._session.answer(encode_error(text))

    # ------------------------------------------------------------------ RDY

    def _spread(self) -> None:
        """Divide the client's RDY among the processes where it is subscribed."""
        live = [place for place in self._places if place.buffer is not None]
        if self._ready >= len(live):
            for number, place in enumerate(live):
                self._set_ready(place, self._ready // len(live) + (number < self._ready % len(live)))
            return
        # First those that have a place already.
        count = len(self._places)
        order = sorted(live, key=lambda place: (not place.ready, (place.index - self._next) % count))
        for number, place in enumerate(order):
            self._set_ready(place, int(number < self._ready))

    def _set_ready(self, place: _Place, ready: int) -> None:
        if place.ready != ready:
            place.ready = ready
            place.turns = 0
            place.put(encode_rdy(ready))
            place.flush()

    def _give_away(self, place: _Place) -> None:
        """Let the next process have the only place of this one."""
        if place.ready != 1 or not self._is_short:
            return
        self._set_ready(place, 0)
        self._next = (place.index + 1) % len(self._places)
        self._spread()

    @property
    def _is_short(self) -> bool:
        """Whether there are more processes than places."""
        return 0 < self._ready < sum(place.buffer is not None for place in self._places)

    async def _take_turns(self) -> None:
        while True:
            await trio.sleep(_TURN_S)
            self._forget_timed_out()
            if not self._is_short:
                continue
            for place in [each for each in self._places if each.ready]:
                place.turns += 1
                if not place.in_flight:
                    self._give_away(place)

    def _forget_timed_out(self) -> None:
        """Forget messages that a process does not wait for any more: they must not keep its turn."""
        timeout_s = self._session.handshake.settings.msg_timeout_ms / 1000
        before_s = trio.current_time() - timeout_s - _LATE_S
        for place in self._places:
            while place.in_flight:
                message_id, at_s = next(iter(place.in_flight.items()))
                if at_s >= before_s:
                    break
                del place.in_flight[message_id]
                self._place_of.pop(message_id, None)


async def _send_rest(buffer: SendBuffer) -> None:
    while await buffer.drain():
        pass


def _frame_at(data: bytes, start: int) -> tuple[int, int] | None:
    """Return the type and the end of a frame; None if it is not complete."""
    if len(data) - start < _HEAD.size:
        return None
    size, kind = _HEAD.unpack_from(data, start)
    end = start + 4 + size
    return (kind, end) if end <= len(data) else None


def _missing_bytes(data: bytes) -> int:
    """Return how many bytes the first frame lacks; of an unknown frame, how many its head lacks."""
    if len(data) < _HEAD.size:
        return _HEAD.size - len(data)
    size, _ = _HEAD.unpack_from(data)
    return max(1, 4 + int(size) - len(data))
