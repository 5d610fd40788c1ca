"""Readers driven as a broker or a client drives them, with results in a form that can be compared."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from struct import pack

from trio_nsq.protocol import CommandError, FrameError, Limits, MessageSet
from trio_nsq.protocol.command_reader import CommandReader
from trio_nsq.protocol.commands import Command, Finish, Publish, StartClose, Subscribe
from trio_nsq.protocol.encode import encode_finish
from trio_nsq.protocol.frames import ErrorFrame, FrameReader, MessageRun, ResponseFrame
from trio_nsq.protocol.limits import MAGIC_V2
from trio_nsq.protocol.states import State

LIMITS = Limits()

Event = ResponseFrame | ErrorFrame | MessageRun


def int32(number: int) -> bytes:
    """Return a size field, also for invalid sizes."""
    return pack(">i", number)


def messages(*bodies: bytes) -> MessageSet:
    """Build a set of messages in a simple way."""
    return MessageSet(b"".join(int32(len(body)) + body for body in bodies), [len(body) for body in bodies])


def mpub_body(*bodies: bytes) -> bytes:
    """Return the body of an MPUB after its command line, with its size field."""
    content = int32(len(bodies)) + messages(*bodies).data
    return int32(len(content)) + content


def reader_in(state: State, limits: Limits = LIMITS) -> CommandReader:
    """Return a reader of a connection in this state, whose client is a producer with a name.

    The client has asked for uncounted requeues.
    """
    reader = CommandReader(limits)
    reader.receive_data(MAGIC_V2)
    assert reader.next_command() is None
    reader.state = state
    reader.numbered = reader.uncounted_requeues = True
    return reader


def drain(reader: CommandReader) -> Iterator[Command | CommandError]:
    """Yield all commands that can be read now. As in a broker, they change the state, and an error ends the
    reading.
    """
    while True:
        try:
            command = reader.next_command()
        except CommandError as exc:
            yield exc
            return
        if command is None:
            return
        if isinstance(command, Subscribe):
            reader.state = State.SUBSCRIBED
        elif isinstance(command, StartClose):
            reader.state = State.CLOSING
        yield command


def read_all(reader: CommandReader, pieces: Iterable[bytes], *, eof: bool = False) -> list[object]:
    """Read these pieces: return the commands, and the text of an error at the end. Adjacent `Finish` are
    joined and runs of PUBs are split, because their grouping depends on how they arrive.
    """
    found: list[object] = []
    for piece in pieces:
        reader.receive_data(piece)
        found += drain(reader)
        if found and isinstance(found[-1], CommandError):
            break
    else:
        if eof:
            reader.receive_eof()
            found += drain(reader)
    joined: list[object] = []
    for command in found:
        if isinstance(command, Finish) and joined and isinstance(joined[-1], Finish):
            joined[-1] = Finish(joined[-1].lines + command.lines)
        elif isinstance(command, CommandError):
            joined.append(command.wire)
        elif isinstance(command, Publish) and command.commands > 1:
            joined += [
                replace(command, messages=messages(body), commands=1) for body in command.messages.bodies()
            ]
        else:
            joined.append(command)
    return joined


def finish(ids: Sequence[bytes]) -> Finish:
    """Return one FIN run for these messages."""
    return Finish(encode_finish(ids))


def single_bytes(data: bytes) -> list[bytes]:
    """Return the data in pieces of one byte."""
    return [data[i : i + 1] for i in range(len(data))]


def split_at(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    """Return the data, split at these positions."""
    places = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in pairwise(places)]


def message_frame(
    body: bytes, *, message_id: bytes = b"0123456789abcdef", timestamp_ns: int = 1, attempts: int = 1
) -> bytes:
    """Build a message frame in a simple way, from the description of the format."""
    data = pack(">qH16s", timestamp_ns, attempts, message_id) + body
    return pack(">ii", 4 + len(data), 2) + data


def read_frames(reader: FrameReader, pieces: Iterable[bytes]) -> list[object]:
    """Read these pieces: return the events, with each message by itself, and an error at the end."""
    found: list[object] = []
    for piece in pieces:
        reader.receive_data(piece)
        try:
            while (event := reader.next_event()) is not None:
                found += flattened(event)
        except FrameError as exc:
            return [*found, str(exc)]
    return found


def flattened(event: Event) -> list[object]:
    """Return the event, or the messages of a run one by one."""
    if not isinstance(event, MessageRun):
        return [event]
    assert len(event) > 0
    return list(zip(event.ids, event.bodies, event.timestamps_ns, event.attempts, strict=True))
