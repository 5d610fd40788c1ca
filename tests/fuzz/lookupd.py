"""Fuzz target for the data of brokers to a discovery service: `lookup.commands.CommandReader`."""

from random import Random

from fuzz.engine import ways
from lookup.support import auth, identify
from trio_nsq.lookup.protocol import (
    MAX_SECRET_BYTES,
    Auth,
    CommandReader,
    Identify,
    Ping,
    Register,
    Unregister,
)
from trio_nsq.protocol import CommandError, is_valid_name

CODES = frozenset({"E_BAD_PROTOCOL", "E_INVALID", "E_BAD_BODY", "E_BAD_TOPIC", "E_BAD_CHANNEL"})
NAMES = (b"t", b"t#ephemeral", b"", b"|", b"x" * 64, b"x" * 65, b"\xff", b"a.b-c_d")
LINES = (b"PING\n", b"PING\r\n", b" PING \n", b"\n", b"NOPE\n", b"REGISTER\n", b"x" * 20_000)


class Lookupd:
    """The reader of a discovery service."""

    name = "lookupd"
    memory_per_byte = 40  # a PING of five bytes is answered at once: only the input is kept
    memory_bytes = 8_000

    def valid(self, rng: Random) -> list[bytes]:
        pieces = [b"  V1"]
        if rng.random() < 0.3:
            pieces.append(auth(b"s" * rng.choice((0, 1, 64, 4096, 4097))))
        if rng.random() < 0.9:
            pieces.append(identify(hostname="h" * rng.choice((0, 1, 1, 100))))
        for _ in range(rng.randrange(8)):
            verb = rng.choice((b"REGISTER ", b"REGISTER ", b"UNREGISTER "))
            names = [rng.choice(NAMES[:2]) if rng.random() < 0.8 else rng.choice(NAMES) for _ in range(2)]
            line = verb + b" ".join(names[: rng.choice((1, 2))]) + b"\n"
            pieces.append(line if rng.random() < 0.8 else rng.choice(LINES))
        return pieces

    def check(self, data: bytes, rng: Random) -> None:
        whole = read([data])
        assert len(whole) <= len(data) // 5 + 1, "commands out of nothing"
        for pieces in ways(data, rng):
            again = read(pieces)
            assert again == whole, f"in pieces of {[*map(len, pieces)][:9]}: {again}; whole: {whole}"

    def read(self, data: bytes) -> None:
        reader = CommandReader()
        reader.receive_data(data)
        try:
            while reader.next_command() is not None:
                pass
        except CommandError:
            pass


def read(pieces: list[bytes]) -> list[object]:
    """Return the commands and the error if there is one; the end of the input is passed on, too."""
    reader = CommandReader()
    found: list[object] = []
    identified = False
    try:
        for piece in [*filter(None, pieces), b""]:
            reader.receive_data(piece)
            while (command := reader.next_command()) is not None:
                found.append(command)
                if isinstance(command, Identify):
                    assert not identified
                    identified = True
                    assert command.info.broadcast_address
                    assert command.info.tcp_port
                elif isinstance(command, Register | Unregister):
                    assert identified
                    assert is_valid_name(command.topic)
                    assert command.channel is None or is_valid_name(command.channel)
                elif isinstance(command, Auth):
                    assert not identified
                    assert len(command.secret) <= MAX_SECRET_BYTES
                else:
                    assert isinstance(command, Ping)
    except CommandError as error:
        found.append(documented(error))
    return found


def documented(error: CommandError) -> bytes:
    """Check that the error is documented."""
    assert error.code in CODES
    return error.wire
