"""The same bytes to nsqd and to our broker: the same frames and the same HTTP answers.

What docs/differences.md lists is left out here, or shown with both answers.
"""

import http.client
import json
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from struct import pack, unpack

import pytest

from interop.peers import Broker, nsqd, qcli_serve

pytestmark = pytest.mark.interop

PATIENCE_S = 20.0
HALF_CLOSE = b"(the client sends no more)"
Script = list[bytes | int]
"""Bytes to send, HALF_CLOSE, and numbers: of frames to wait for before going on."""
END = b"NOP\nNOPE\n"
"""Ends a script that is not ended by an error of its own: whatever was to come has come before the answer."""


@dataclass(frozen=True)
class Pair:
    """Both brokers."""

    nsqd: Broker
    ours: Broker


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("brokers")
    with nsqd(folder / "nsqd") as theirs, qcli_serve(folder / "ours") as ours:
        yield Pair(theirs, ours)


# ---------------------------------------------------------------------- raw conversations


class Talk:
    """One connection: bytes out, frames in, with ids and timestamps replaced by what does not differ."""

    def __init__(self, broker: Broker) -> None:
        host, _, port = broker.tcp_address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
        self._stream = self._socket.makefile("rb")
        self._numbers: dict[bytes, int] = {}
        self.ids: list[bytes] = []

    def __enter__(self) -> "Talk":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stream.close()
        self._socket.close()

    def send(self, data: bytes) -> None:
        """Send, `{N}` being the id of the message that came as the Nth."""
        self._socket.sendall(re.sub(rb"\{([0-9])\}", lambda m: self.ids[int(m[1])], data))

    def half_close(self) -> None:
        self._socket.shutdown(socket.SHUT_WR)

    def frame(self) -> tuple[int, bytes] | None:
        """The next frame but for heartbeats; None at the end."""
        while True:
            try:
                head = self._stream.read(8)
            except ConnectionResetError:
                return None
            if len(head) < 8:
                assert not head
                return None
            size, kind = unpack(">ii", head)
            data = self._stream.read(size - 4)
            if kind == 2:
                return kind, self._message(data)
            if data != b"_heartbeat_":
                return kind, self._normal(data)

    def _message(self, data: bytes) -> bytes:
        timestamp_ns, attempts, message_id = unpack(">qH16s", data[:26])
        assert abs(timestamp_ns - time.time_ns()) < 60e9
        if message_id not in self.ids:
            self.ids.append(message_id)
        return b"%d attempts, %b: %b" % (attempts, self._normal(message_id), data[26:])

    def _normal(self, data: bytes) -> bytes:
        for number, message_id in enumerate(self.ids):
            data = data.replace(message_id, b"{%d}" % number)
        return re.sub(rb'"version":"[^"]*"', b'"version":""', data)


def identify(**fields: object) -> bytes:
    return identify_raw(json.dumps(fields).encode())


def identify_raw(body: bytes) -> bytes:
    return b"IDENTIFY\n" + sized(body)


def sized(data: bytes) -> bytes:
    return pack(">i", len(data)) + data


def batch(*bodies: bytes) -> bytes:
    return sized(pack(">i", len(bodies)) + b"".join(map(sized, bodies)))


def conversation(broker: Broker, script: Script) -> tuple[list[bytes], list[bytes]]:
    """What a broker answers: messages, and everything else. Nobody promises in which order a publisher gets the
    answer and, being a consumer too, the message.
    """
    frames: list[tuple[int, bytes]] = []
    with Talk(broker) as talk:
        for step in script:
            if step is HALF_CLOSE:
                talk.half_close()
            elif isinstance(step, bytes):
                talk.send(step)
            else:
                for _ in range(step):
                    frame = talk.frame()
                    assert frame is not None, frames
                    frames.append(frame)
        while (frame := talk.frame()) is not None:
            frames.append(frame)
    return [data for kind, data in frames if kind == 2], [
        b"%d %b" % frame for frame in frames if frame[0] != 2
    ]


V2 = b"  V2"
SUB = b"SUB T c\n"
GONE = b"0123456789abcdef"

# Every T stands for a topic of the script's own. Scripts end with an error, for then the connection ends.
SCRIPTS: dict[str, Script] = {
    # -- greeting and lines
    "magic of V1": [b"  V1"],
    "no magic": [b"GET "],
    "unknown verb": [V2 + b"NOPE\n"],
    "verb in lower case": [V2 + b"pub T\n"],
    "empty line": [V2 + b"\n"],
    "carriage return": [V2 + b"NOP\r\nNOPE\r\n"],
    "two carriage returns": [V2 + b"NOP\r\r\n"],
    "leading space": [V2 + b" NOP\n"],
    "bytes that are no text": [V2 + b"\xff\x00\n"],
    "surplus parameters": [V2 + b"NOP 1 2\nPUB T more\n" + sized(b"x") + END],
    # -- IDENTIFY
    "IDENTIFY without negotiation": [V2 + identify() + END],
    "IDENTIFY null": [V2 + identify_raw(b"null") + END],
    "IDENTIFY reply": [V2 + identify(feature_negotiation=True) + END],
    "IDENTIFY all in range": [
        V2
        + identify(
            feature_negotiation=True,
            heartbeat_interval=60000,
            output_buffer_size=64,
            output_buffer_timeout=25,
            msg_timeout=900000,
            deflate_level=9,
        )
        + END
    ],
    "IDENTIFY all off": [
        V2
        + identify(
            feature_negotiation=True, heartbeat_interval=-1, output_buffer_timeout=-1, deflate_level=-1
        )
        + END
    ],
    "IDENTIFY unbuffered": [V2 + identify(feature_negotiation=True, output_buffer_size=-1) + END],
    "IDENTIFY twice": [
        V2 + identify(feature_negotiation=True) + identify(feature_negotiation=True, msg_timeout=5000) + END
    ],
    "IDENTIFY keys in any case": [V2 + identify(Feature_Negotiation=True, MSG_TIMEOUT=2000) + END],
    "IDENTIFY unknown keys": [V2 + identify(short_id="a", long_id=["b"], feature_negotiation=True) + END],
    "IDENTIFY wrong type": [V2 + identify(msg_timeout="1000")],
    "IDENTIFY float": [V2 + identify(msg_timeout=5000.5)],
    "IDENTIFY exponent": [V2 + identify_raw(b'{"msg_timeout":5e3}')],
    "IDENTIFY array": [V2 + identify_raw(b"[]")],
    "IDENTIFY no JSON": [V2 + identify_raw(b"{")],
    "IDENTIFY empty": [V2 + identify_raw(b"")],
    "IDENTIFY negative size": [V2 + b"IDENTIFY\n\xff\xff\xff\xff"],
    "IDENTIFY too big": [V2 + b"IDENTIFY\n" + pack(">i", 5242881)],
    "IDENTIFY heartbeat too short": [V2 + identify(heartbeat_interval=999)],
    "IDENTIFY heartbeat too long": [V2 + identify(heartbeat_interval=60001)],
    "IDENTIFY buffer too small": [V2 + identify(output_buffer_size=63)],
    "IDENTIFY buffer too large": [V2 + identify(output_buffer_size=65537)],
    "IDENTIFY buffer timeout too short": [V2 + identify(output_buffer_timeout=24)],
    "IDENTIFY buffer timeout too long": [V2 + identify(output_buffer_timeout=30001)],
    "IDENTIFY sample rate": [V2 + identify(sample_rate=100)],
    "IDENTIFY negative sample rate": [V2 + identify(sample_rate=-1)],
    "IDENTIFY msg timeout too short": [V2 + identify(msg_timeout=999)],
    "IDENTIFY msg timeout too long": [V2 + identify(msg_timeout=900001)],
    "IDENTIFY msg timeout off": [V2 + identify(msg_timeout=-1)],
    "IDENTIFY first of several errors": [V2 + identify(msg_timeout=1, heartbeat_interval=1, sample_rate=-1)],
    "IDENTIFY after SUB": [V2 + SUB + identify()],
    "IDENTIFY after PUB": [V2 + b"PUB T\n" + sized(b"x") + identify() + END],
    "heartbeats off, then SUB": [V2 + identify(heartbeat_interval=-1) + b"SUB T\n"],
    "heartbeats off, then on, then SUB": [
        V2 + identify(heartbeat_interval=-1) + identify(heartbeat_interval=5000) + SUB + END
    ],
    "heartbeats on, then off, then SUB": [V2 + identify() + identify(heartbeat_interval=-1) + SUB],
    # -- AUTH
    "AUTH disabled": [V2 + b"AUTH\n" + sized(b"secret")],
    "AUTH with a parameter": [V2 + b"AUTH x\n"],
    "AUTH empty": [V2 + b"AUTH\n" + sized(b"")],
    "AUTH after SUB": [V2 + SUB + b"AUTH\n" + sized(b"x")],
    # -- SUB
    "SUB without channel": [V2 + b"SUB T\n"],
    "SUB without anything": [V2 + b"SUB\n"],
    "SUB twice": [V2 + SUB + SUB],
    "SUB bad topic": [V2 + b"SUB T| c\n"],
    "SUB empty topic": [V2 + b"SUB  c\n"],
    "SUB bad channel": [V2 + b"SUB T c#ephemera\n"],
    "SUB channel too long": [V2 + b"SUB T " + b"c" * 65 + b"\n"],
    "SUB longest channel": [V2 + b"SUB T " + b"c" * 64 + b"\n" + END],
    "SUB ephemeral": [V2 + b"SUB T#ephemeral c#ephemeral\n" + END],
    "SUB quoting": [V2 + b'SUB a"b\\\t\x7f\xc3\xa9\xff c\n'],
    # -- states
    "FIN before SUB": [V2 + b"FIN " + GONE + b"\n"],
    "REQ before SUB": [V2 + b"REQ " + GONE + b" 0\n"],
    "TOUCH before SUB": [V2 + b"TOUCH " + GONE + b"\n"],
    "RDY before SUB": [V2 + b"RDY 1\n"],
    "CLS before SUB": [V2 + b"CLS\n"],
    "CLS": [V2 + SUB + b"CLS\nRDY 1\nNOP\n" + END],
    "CLS twice": [V2 + SUB + b"CLS\nCLS\n"],
    "RDY nonsense after CLS": [V2 + SUB + b"CLS\nRDY 99999\nRDY x\n" + END],
    "SUB after CLS": [V2 + SUB + b"CLS\n" + SUB],
    "PUB after CLS": [V2 + SUB + b"CLS\nPUB T\n" + sized(b"x") + END],
    "FIN after CLS": [V2 + SUB + b"RDY 1\nPUB T\n" + sized(b"x"), 3, b"CLS\nFIN {0}\nFIN {0}\n" + END],
    # -- RDY
    "RDY too high": [V2 + SUB + b"RDY 2501\n"],
    "RDY highest": [V2 + SUB + b"RDY 2500\n" + END],
    "RDY negative": [V2 + SUB + b"RDY -1\n"],
    "RDY signed": [V2 + SUB + b"RDY +1\n"],
    "RDY word": [V2 + SUB + b"RDY x\n"],
    "RDY empty": [V2 + SUB + b"RDY \n" + END],
    "RDY without count is 1": [V2 + b"MPUB T\n" + batch(b"1", b"2") + SUB + b"RDY\n", 3, b"CLS\n" + END],
    "RDY with zeroes": [V2 + SUB + b"RDY 0000000000000000000000000000001\n" + END],
    # -- FIN, REQ, TOUCH
    "FIN unknown": [V2 + SUB + b"FIN " + GONE + b"\n" + END],
    "FIN twice": [V2 + SUB + b"RDY 1\nPUB T\n" + sized(b"x"), 3, b"FIN {0}\nFIN {0}\n" + END],
    "FIN id too short": [V2 + SUB + b"FIN 0123\n"],
    "FIN id too long": [V2 + SUB + b"FIN " + GONE + b"0\n"],
    "FIN without id": [V2 + SUB + b"FIN\n"],
    "FIN surplus": [V2 + SUB + b"FIN " + GONE + b" more\n" + END],
    "REQ unknown": [V2 + SUB + b"REQ " + GONE + b" 0\n" + END],
    "REQ without time": [V2 + SUB + b"REQ " + GONE + b"\n"],
    "REQ bad id": [V2 + SUB + b"REQ 1 0\n"],
    "REQ bad time": [V2 + SUB + b"REQ " + GONE + b" soon\n"],
    "REQ negative time": [V2 + SUB + b"REQ " + GONE + b" -1\n"],
    "REQ empty time": [V2 + SUB + b"REQ " + GONE + b" \n" + END],
    "REQ at once": [
        V2 + SUB + b"RDY 1\nPUB T\n" + sized(b"x"),
        3,
        b"REQ {0} 0\n",
        1,
        b"FIN {0}\nFIN {0}\n" + END,
    ],
    "REQ above the maximum": [
        V2 + SUB + b"RDY 1\nPUB T\n" + sized(b"x"),
        3,
        b"REQ {0} 99999999\nFIN {0}\nREQ {0} 0\n" + END,
    ],
    "TOUCH": [
        V2 + SUB + b"RDY 1\nPUB T\n" + sized(b"x"),
        3,
        b"TOUCH {0}\nTOUCH {0}\nFIN {0}\nTOUCH {0}\n" + END,
    ],
    "TOUCH unknown": [V2 + SUB + b"TOUCH " + GONE + b"\n" + END],
    "TOUCH without id": [V2 + SUB + b"TOUCH\n"],
    "TOUCH bad id": [V2 + SUB + b"TOUCH 1\n"],
    # -- PUB
    "PUB": [V2 + b"PUB T\n" + sized(b"x") + END],
    "PUB without topic": [V2 + b"PUB\n"],
    "PUB bad topic": [V2 + b"PUB bad|name\n" + sized(b"x")],
    "PUB topic too long": [V2 + b"PUB " + b"t" * 65 + b"\n"],
    "PUB empty message": [V2 + b"PUB T\n" + sized(b"")],
    "PUB negative size": [V2 + b"PUB T\n\xff\xff\xff\xff"],
    "PUB too big": [V2 + b"PUB T\n" + pack(">i", 1048577)],
    "PUB biggest": [V2 + b"PUB T\n" + sized(bytes(1048576)) + END],
    "PUB in state SUB": [V2 + SUB + b"RDY 1\nPUB T\n" + sized(b"x"), 3, b"FIN {0}\n" + END],
    # -- DPUB
    "DPUB at once": [V2 + SUB + b"RDY 1\nDPUB T 0\n" + sized(b"x"), 3, b"FIN {0}\n" + END],
    "DPUB latest": [V2 + b"DPUB T 3600000\n" + sized(b"x") + END],
    "DPUB too late": [V2 + b"DPUB T 3600001\n"],
    "DPUB negative": [V2 + b"DPUB T -1\n"],
    "DPUB word": [V2 + b"DPUB T soon\n"],
    "DPUB empty time": [V2 + b"DPUB T \n" + sized(b"x") + END],
    "DPUB without time": [V2 + b"DPUB T\n"],
    "DPUB bad topic and time": [V2 + b"DPUB bad|name soon\n"],
    "DPUB empty message": [V2 + b"DPUB T 1\n" + sized(b"")],
    "DPUB too big": [V2 + b"DPUB T 1\n" + pack(">i", 1048577)],
    # -- MPUB
    "MPUB": [
        V2 + SUB + b"RDY 3\nMPUB T\n" + batch(b"1", b"22", b"333"),
        5,
        b"FIN {2}\nFIN {0}\nFIN {1}\n" + END,
    ],
    "MPUB without topic": [V2 + b"MPUB\n"],
    "MPUB no messages": [V2 + b"MPUB T\n" + batch()],
    "MPUB negative count": [V2 + b"MPUB T\n" + sized(pack(">i", -1))],
    "MPUB count too high": [V2 + b"MPUB T\n" + pack(">ii", 5242880, 1048576)],
    "MPUB empty message": [V2 + b"MPUB T\n" + batch(b"1", b"", b"3")],
    "MPUB message too big": [V2 + b"MPUB T\n" + pack(">iii", 2000000, 1, 1048577)],
    "MPUB negative message size": [V2 + b"MPUB T\n" + pack(">iii", 100, 1, -5)],
    "MPUB body too big": [V2 + b"MPUB T\n" + pack(">i", 5242881)],
    "MPUB empty body": [V2 + b"MPUB T\n" + pack(">i", 0)],
    # -- the end comes too early
    "nothing but the magic": [V2, HALF_CLOSE],
    "half a magic": [b"  ", HALF_CLOSE],
    "half a line": [V2 + b"PUB T", HALF_CLOSE],
    "overlong line": [V2 + b"x" * 16385],
    "longest line": [V2 + b"NOP " + b"x" * 16379 + b"\n" + END],
    "no IDENTIFY size": [V2 + b"IDENTIFY\n\0\0", HALF_CLOSE],
    "half an IDENTIFY": [V2 + identify()[:-1], HALF_CLOSE],
    "no PUB size": [V2 + b"PUB T\n\0", HALF_CLOSE],
    "half a PUB": [V2 + b"PUB T\n" + sized(b"half")[:-1], HALF_CLOSE],
    "no DPUB size": [V2 + b"DPUB T 1\n\0", HALF_CLOSE],
    "half a DPUB": [V2 + b"DPUB T 1\n" + sized(b"half")[:-1], HALF_CLOSE],
    "no MPUB size": [V2 + b"MPUB T\n\0", HALF_CLOSE],
    "no MPUB count": [V2 + b"MPUB T\n" + batch(b"1")[:6], HALF_CLOSE],
    "half an MPUB size": [V2 + b"MPUB T\n" + batch(b"1", b"2")[:-2], HALF_CLOSE],
    "half an MPUB message": [V2 + b"MPUB T\n" + batch(b"1", b"22")[:-1], HALF_CLOSE],
    # -- errors and what was before them
    "answers before the error": [V2 + b"PUB T\n" + sized(b"1") + b"MPUB T\n" + batch(b"2") + b"PUB |\n"],
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_same_frames(pair: Pair, name: str) -> None:
    topic = b"topic%d" % list(SCRIPTS).index(name)
    script = [re.sub(rb"\bT\b", topic, step) if isinstance(step, bytes) else step for step in SCRIPTS[name]]
    assert conversation(pair.ours, script) == conversation(pair.nsqd, script)


# ---------------------------------------------------------------------- HTTP

REQUESTS: list[tuple[str, str, bytes | int]] = [
    # (method, path and query, body); a number is the length of a body that is announced and not sent
    ("GET", "/ping", b""),
    ("HEAD", "/ping", b""),
    ("POST", "/ping", b""),
    ("OPTIONS", "/ping", b""),
    ("GET", "/ping/", b""),
    ("GET", "/Ping", b""),
    ("GET", "//ping", b""),
    ("GET", "/", b""),
    ("GET", "/nowhere", b""),
    ("POST", "/nowhere?topic=known", b""),
    ("GET", "/pub?topic=known", b""),
    ("PUT", "/pub?topic=known", b"x"),
    ("POST", "/pub/?topic=known", b"x"),
    ("DELETE", "/topic/delete?topic=known", b""),
    ("POST", "/stats", b""),
    ("GET", "/stats?format=json&topic=unknown&include_mem=false", b""),
    ("GET", "/stats?format=json&topic=known&channel=unknown&include_mem=false", b""),
    ("GET", "/stats?format=json&topic=known&include_clients=false&include_mem=false", b""),
    ("GET", "/stats?format=json&topic=known&include_clients=F&include_mem=false", b""),
    ("GET", "/stats?format=json&topic=known&channel=c&include_mem=false", b""),
    ("GET", "/stats?topic=%zz", b""),
    ("GET", "/stats?format=json;topic=a", b""),
    # -- /pub
    ("POST", "/pub?topic=known", b"x"),
    ("POST", "/pub?topic=new.pub", b"x"),
    ("POST", "/pub?topic=known", b""),
    ("POST", "/pub", b""),
    ("POST", "/pub", b"x"),
    ("POST", "/pub?topic=", b"x"),
    ("POST", "/pub?topic=a|b", b"x"),
    ("POST", "/pub?topic=a%0a", b"x"),
    ("POST", "/pub?topic=known&topic=a|b", b"x"),
    ("POST", "/pub?topic=" + "t" * 65, b"x"),
    ("POST", "/pub?topic=eph%23ephemeral", b"x"),
    ("POST", "/pub?topic=eph#ephemeral", b"x"),
    ("POST", "/pub?topic=known&topic=%zz", b"x"),
    ("POST", "/pub?topic=known", bytes(1048576)),
    ("POST", "/pub?topic=known", 1048577),
    ("POST", "/pub?topic=known&defer=0", b"x"),
    ("POST", "/pub?topic=known&defer=3600000", b"x"),
    ("POST", "/pub?topic=known&defer=3600001", b"x"),
    ("POST", "/pub?topic=known&defer=-1", b"x"),
    ("POST", "/pub?topic=known&defer=-0", b"x"),
    ("POST", "/pub?topic=known&defer=%2B5", b"x"),
    ("POST", "/pub?topic=known&defer=", b"x"),
    ("POST", "/pub?topic=known&defer", b"x"),
    ("POST", "/pub?topic=known&defer=soon", b"x"),
    ("POST", "/pub?topic=known&defer=1.5", b"x"),
    ("POST", "/pub?topic=known&defer=0x10", b"x"),
    ("POST", "/pub?topic=known&defer=1_0", b"x"),
    ("POST", "/pub?topic=known&defer=" + "9" * 5000, b"x"),
    ("POST", "/pub?topic=known&defer=" + "0" * 5000 + "1", b"x"),
    ("POST", "/pub?topic=a|b&defer=soon", b"x"),
    ("POST", "/pub?defer=soon", b"x"),
    # -- /mpub
    ("POST", "/mpub?topic=known", b"a\nb\n"),
    ("POST", "/mpub?topic=known", b""),
    ("POST", "/mpub?topic=known", b"\n\n"),
    ("POST", "/mpub", b"a"),
    ("POST", "/mpub?topic=a|b", b"a"),
    ("POST", "/mpub?topic=known", bytes(1048577)),
    ("POST", "/mpub?topic=known", (b"x" * 1048575 + b"\n") * 5),
    ("POST", "/mpub?topic=known", 5242881),
    ("POST", "/mpub?topic=known&binary=true", batch(b"a", b"b")[4:]),
    ("POST", "/mpub?topic=known&binary=1", batch(b"a")[4:]),
    ("POST", "/mpub?topic=known&binary=", batch(b"a")[4:]),
    ("POST", "/mpub?topic=known&binary", batch(b"a")[4:]),
    ("POST", "/mpub?topic=known&binary=yes", b"text"),
    ("POST", "/mpub?topic=known&binary=false", b"text"),
    ("POST", "/mpub?topic=known&binary=0", b"text"),
    ("POST", "/mpub?topic=known&binary=f", b"text"),
    ("POST", "/mpub?topic=known&binary=F", b"text"),
    ("POST", "/mpub?topic=known&binary=FALSE", b"text"),
    ("POST", "/mpub?topic=known&binary=False", b"text"),
    ("POST", "/mpub?topic=known&binary=true", b""),
    ("POST", "/mpub?topic=known&binary=true", pack(">i", 0)),
    ("POST", "/mpub?topic=known&binary=true", pack(">i", -1)),
    ("POST", "/mpub?topic=known&binary=true", pack(">i", 1048576)),
    ("POST", "/mpub?topic=known&binary=true", pack(">ii", 1, 0)),
    ("POST", "/mpub?topic=known&binary=true", pack(">ii", 1, -1)),
    ("POST", "/mpub?topic=known&binary=true", pack(">ii", 1, 1048577)),
    ("POST", "/mpub?topic=known&binary=true", pack(">ii", 1, 5) + b"half"),
    ("POST", "/mpub?topic=known&binary=true", pack(">ii", 2, 1) + b"a"),
    # -- topics
    ("POST", "/topic/create?topic=new", b""),
    ("POST", "/topic/create?topic=new", b"with a body"),
    ("POST", "/topic/create", b""),
    ("POST", "/topic/create?topic=", b""),
    ("POST", "/topic/create?topic=a|b", b""),
    ("GET", "/topic/create?topic=new", b""),
    ("POST", "/Topic/Create?topic=new", b""),
    ("POST", "/topic/pause?topic=new", b""),
    ("POST", "/topic/pause?topic=new", b""),
    ("POST", "/topic/pause?topic=a|b", b""),
    ("POST", "/topic/pause?topic=unknown", b""),
    ("POST", "/topic/pause", b""),
    ("POST", "/topic/unpause?topic=new", b""),
    ("POST", "/topic/unpause?topic=unknown", b""),
    ("POST", "/topic/empty?topic=new", b""),
    ("POST", "/topic/empty?topic=unknown", b""),
    ("POST", "/topic/empty?topic=a|b", b""),
    ("POST", "/topic/empty", b""),
    # -- channels
    ("POST", "/channel/create?topic=new&channel=c", b""),
    ("POST", "/channel/create?topic=new&channel=c", b""),
    ("POST", "/channel/create?topic=new&channel=a|b", b""),
    ("POST", "/channel/create?topic=new", b""),
    ("POST", "/channel/create?channel=c", b""),
    ("POST", "/channel/create?topic=a|b&channel=c", b""),
    ("POST", "/channel/create?topic=a|b", b""),
    ("POST", "/channel/create?topic=unknown&channel=c", b""),
    ("POST", "/channel/create?topic=unknown&channel=a|b", b""),
    ("POST", "/channel/pause?topic=new&channel=c", b""),
    ("POST", "/channel/pause?topic=new&channel=unknown", b""),
    ("POST", "/channel/unpause?topic=new&channel=c", b""),
    ("POST", "/channel/empty?topic=new&channel=c", b""),
    ("POST", "/channel/empty?topic=unknown&channel=c", b""),
    ("POST", "/channel/delete?topic=new&channel=c", b""),
    ("POST", "/channel/delete?topic=new&channel=c", b""),
    ("POST", "/channel/delete?topic=new", b""),
    ("POST", "/channel/nothing?topic=new&channel=c", b""),
    ("POST", "/topic/delete?topic=new", b""),
    ("POST", "/topic/delete?topic=new", b""),
    ("POST", "/topic/delete?topic=a|b", b""),
    ("POST", "/topic/delete", b""),
]


def answers(broker: Broker) -> list[tuple[str, object]]:
    """What a broker answers to all requests, one after the other."""
    broker.create("known", "c")
    found: list[tuple[str, object]] = []
    for method, target, body in REQUESTS:
        connection = http.client.HTTPConnection(broker.http_address, timeout=PATIENCE_S)
        try:
            connection.putrequest(method, target.partition("#")[0])
            connection.putheader("Content-Length", str(body if isinstance(body, int) else len(body)))
            connection.endheaders(b"" if isinstance(body, int) else body)
            reply = connection.getresponse()
            content = reply.read()
        finally:
            connection.close()
        headers = {name: reply.getheader(name) for name in ("Allow", "Location")}
        if reply.status not in (301, 307) and method != "OPTIONS":
            headers |= {name: reply.getheader(name) for name in ("Content-Type", "X-Nsq-Content-Type")}
            content = re.sub(rb'"(version":"[^"]*|start_time":[0-9]*)', b'"', content)
        elif reply.status == 301:
            content = b""
        what = body if isinstance(body, int) else body[:12]
        found.append((f"{method} {target[:80]} {what!r}", (reply.status, content, headers)))
    return found


def test_same_http_answers(pair: Pair) -> None:
    ours, theirs = answers(pair.ours), answers(pair.nsqd)
    differences = [f"{a[0]}: ours {a[1]}, nsqd {b[1]}" for a, b in zip(ours, theirs, strict=True) if a != b]
    assert not differences, "\n".join(differences)


# ---------------------------------------------------------------------- /stats of clients at work


def stats(broker: Broker, topic: str) -> bytes:
    """What /stats says of a topic and its clients, word for word, but for what must differ."""
    raw = broker.http("GET", "/stats", format="json", topic=topic, include_mem="false")
    raw = re.sub(rb'"(version":"[0-9][^"]*|start_time":[0-9]*|connect_ts":[0-9]*)', b'"', raw)
    return re.sub(rb'("remote_address":"127\.0\.0\.1:)[0-9]+', rb"\1", raw)


def test_same_stats(pair: Pair) -> None:
    about = {"client_id": "it", "hostname": "here", "user_agent": "test/1"}
    script = [
        (b"  V2" + identify(**about) + b"SUB stats c\nRDY 3\n", 2),
        (b"MPUB stats\n" + batch(*[b"%d" % n for n in range(6)]), 4),
        (b"PUB stats\n" + sized(b"pub") + b"DPUB stats 3600000\n" + sized(b"later"), 2),
        (b"FIN {0}\n", 1),
        (b"REQ {1} 3600000\n", 1),
        (b"CLS\n", 1),
    ]
    with Talk(pair.ours) as ours, Talk(pair.nsqd) as theirs:
        for talk in (ours, theirs):
            for data, frames in script:
                talk.send(data)
                for _ in range(frames):
                    assert talk.frame() is not None
        mine = stats(pair.ours, "stats")
        deadline = time.monotonic() + PATIENCE_S
        # nsqd moves messages from the topic to the channel in its own time.
        while (real := stats(pair.nsqd, "stats")) != mine and time.monotonic() < deadline:
            pass
        assert mine == real
