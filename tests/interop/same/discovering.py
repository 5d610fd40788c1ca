"""Scripts for discovery: the commands of producers over TCP, and queries and changes over HTTP.

The scripts have the form of those in `stage`, but another protocol: clients begin with the magic of V1, and responses
have no frame type. All scripts share one discovery service, and each has its own topic. Clients whose name begins
with a letter have sent IDENTIFY.
"""

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from struct import pack, unpack
from typing import Any

from interop.peers import Broker, nsqlookupd, qcli_lookupd
from interop.same.stage import (
    Client,
    Script,
    Stage,
    Step,
    client,
    compare,
    differs,
    half_close,
    http_request,
    play,
    post,
    raw,
    same,
)

MAGIC = b"  V1"
END = b"NOPE\n"
ENDED = "E_INVALID invalid command NOPE"
IDENTIFIED = '{"broadcast_address":"127.0.0.1","hostname":"","http_port":N,"tcp_port":N,"version":""}'
IDENTITY = {
    "broadcast_address": "b",
    "hostname": "h",
    "http_port": 4151,
    "tcp_port": 4150,
    "version": "1.3.0",
}


class Producer(Client):
    """One connection to a discovery service."""

    def send(self, data: bytes) -> None:
        self.send_raw(data if self._greeted else MAGIC + data)

    def read_frame(self) -> bool:
        """Record the next response; return false at the end of the connection."""
        head = self._read(4)
        if not head:
            return False
        (size,) = unpack(">i", head) if len(head) == 4 else (-1,)
        data = self._read(size) if 0 <= size < 2**20 else b""
        if len(data) != size:
            self.answers.append(f"(no response: {head + data!r})")
            return False
        self.answers.append(_normal(data.decode("utf-8", "backslashreplace")))
        return True


class Lookupd(Stage):
    """A run of one script with one service."""

    @property
    def client(self) -> Client:
        if self.name not in self.clients:
            self.clients[self.name] = Producer(self.broker, [])
        return self.clients[self.name]

    def transcript(self) -> list[str]:
        return [_normal(line) for line in super().transcript()]


def _normal(text: str) -> str:
    """Replace ports, versions, host names, times and ids, and sort arrays, whose order is unspecified."""
    start = text.find("{")
    if start >= 0:
        try:
            decoded = json.loads(text[start:])
        except ValueError:
            return text
        text = text[:start] + json.dumps(_in_order(decoded), separators=(",", ":"))
    if '"tcp_port":4150' not in text:
        text = re.sub(r'"(tcp_port|http_port)":\d+', r'"\1":N', text)
        text = re.sub(r'"(version|hostname)":"[^"]*"', r'"\1":""', text)
    text = re.sub(r'"last_update":\d{19}', '"last_update":NS', text)
    text = re.sub(r'"tombstoned_at":\d{19}', '"tombstoned_at":NS', text)
    return re.sub(r'"(remote_address|id)":"127\.0\.0\.1:\d+"', r'"\1":"PEER"', text)


def _in_order(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _in_order(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return sorted(map(_in_order, value), key=json.dumps)
    return value


@dataclass(frozen=True)
class LookupdPair:
    """Both services, started with the same options."""

    theirs: Broker
    ours: Broker


@contextmanager
def lookupd_pair(*flags: str) -> Iterator[LookupdPair]:
    """Run nsqlookupd and our service with the same ``flags``."""
    with nsqlookupd(*flags) as theirs, qcli_lookupd(*flags) as ours:
        yield LookupdPair(theirs, ours)


def check(lookupds: LookupdPair, topic: str, script: Script) -> None:
    """Play the script with both services; fail unless their answers are equal, or differ as the script's row states."""
    compare(script, *(play(Lookupd(each, topic), script) for each in (lookupds.theirs, lookupds.ours)))


# ------------------------------------------------------------------------------------------------ bytes and steps


def sized(data: bytes) -> bytes:
    return pack(">i", len(data)) + data


def identify_raw(body: bytes) -> bytes:
    return b"IDENTIFY\n" + sized(body)


def identify(*without: str, **changes: object) -> bytes:
    fields = {key: value for key, value in (IDENTITY | changes).items() if key not in without}
    return identify_raw(json.dumps(fields).encode())


def get(target: str) -> Step:
    return http_request("GET", target)


def own(target: str) -> Step:
    """Send a GET request. Record only the entries of the script's own topic, or of producers with its name."""

    def step(stage: Stage) -> None:
        status, content = stage.request("GET", target)
        decoded = json.loads(content)
        if target == "/debug":
            found: Any = {key: value for key, value in decoded.items() if f":{stage.topic}:" in key}
        elif target == "/nodes":
            found = [node for node in decoded["producers"] if node["hostname"] == stage.topic]
        else:
            found = [name for name in decoded["topics"] if name.startswith(stage.topic)]
        stage.http_answers.append(f"{target} {status} {json.dumps({'found': found}, sort_keys=True)}")

    return step


def gone(stage: Stage) -> None:
    """Close the client, and wait until the service has removed its registrations."""
    stage.client.socket.shutdown(1)
    while stage.client.read_frame():
        pass
    # Our service cleans up before it closes the connection; nsqlookupd does it afterwards.
    for _ in range(1000):
        _, content = stage.request("GET", "/nodes")
        if not any(node["hostname"] == stage.topic for node in json.loads(content)["producers"]):
            return
    raise AssertionError("the producer stays")


def introduced(**changes: object) -> Step:
    """Send IDENTIFY with the script's topic as the host name, and read the response."""

    def step(stage: Stage) -> None:
        stage.do(identify(hostname=stage.topic, **changes))
        stage.do(1)

    return step


I = identify()  # noqa: E741
HI = introduced()
REG = (b"REGISTER T\nREGISTER T c\n", 2)
LOOKUP = get("/lookup?topic=T")
CHANNELS = get("/channels?topic=T")
DEBUG = own("/debug")


def _lines(commands: Iterable[bytes]) -> dict[str, Script]:
    """Return scripts that send each command before IDENTIFY, and after it."""
    scripts = {}
    for line in commands:
        scripts[f"{line!r} first"] = same(line, half_close)
        scripts[f"{line!r} after IDENTIFY"] = same(I + line, half_close)
    return scripts


SCRIPTS: dict[str, Script] = _lines(
    [
        b"PING\n",
        b"PING more\n",
        b" PING \r\n",
        b"\t PING\n",
        b"ping\n",
        b"\n",
        b"\r\n",
        b"PINGS\n",
        b"NOPE x y\n",
        b"\xff\xfe\n",
        b"REGISTER\n",
        b"REGISTER \n",
        b"REGISTER T\n",
        b"REGISTER T c\n",
        b"REGISTER T  c\n",
        b"REGISTER  T c\n",
        b"REGISTER T c d\n",
        b"REGISTER T c\r\n",
        b"REGISTER T#ephemeral c#ephemeral\n",
        b"REGISTER T#other\n",
        b"REGISTER T c|\n",
        b"REGISTER | c\n",
        b"REGISTER T \xff\n",
        b"REGISTER 'quoted'\n",
        b"REGISTER " + b"x" * 64 + b"\n",
        b"REGISTER " + b"x" * 65 + b"\n",
        b"REGISTER T " + b"x" * 65 + b"\n",
        b"UNREGISTER\n",
        b"UNREGISTER T\n",
        b"UNREGISTER T c\n",
        b"UNREGISTER T#ephemeral\n",
        b"UNREGISTER |\n",
        b"UNREGISTER T |\n",
        I,
    ]
) | {
    # -- greeting
    "no magic": same(raw(b"GET ")),
    "magic of V2": same(raw(b"  V2")),
    "half a magic": same(raw(b"  "), half_close),
    "nothing": same(raw(b""), half_close),
    "magic in pieces": same(raw(b" "), raw(b" V"), raw(b"1PING\n"), half_close),
    "half a line": same(b"PING\nPIN", half_close),
    # -- IDENTIFY
    "IDENTIFY with parameters": same(b"IDENTIFY x y\n" + sized(b"{}")),
    "no body size": same(b"IDENTIFY\n\0\0", half_close),
    "half a body": same(I[:-1], half_close),
    "a body that is no JSON": same(identify_raw(b"{")),
    "an empty body": same(identify_raw(b"")),
    "a body that is an array": same(identify_raw(b"[]")),
    "a body that is null": same(identify_raw(b"null")),
    "no fields": same(identify_raw(b"{}")),
    **{f"without {key}": same(identify(key), half_close) for key in IDENTITY},
    "without the host name, further": same(identify("hostname") + b"REGISTER T\n", 2, LOOKUP, half_close),
    "a port that is text": same(identify(tcp_port="4150")),
    "a port of 0": same(identify(http_port=0)),
    "a port below 0": differs(
        "lookupd-identify",
        *(identify(http_port=-1), half_close),
        here=["E_BAD_BODY IDENTIFY invalid port"],
    ),
    "a port above 65535": differs(
        "lookupd-identify",
        *(identify(tcp_port=70000), half_close),
        here=["E_BAD_BODY IDENTIFY invalid port"],
    ),
    "an address that is a number": same(identify(broadcast_address=1)),
    "keys in upper case": same(
        identify_raw(json.dumps({k.upper(): v for k, v in IDENTITY.items()}).encode()), half_close
    ),
    "more keys": same(identify(tags=["x"]), half_close),
    "answers before the error": same(I + b"PING\nREGISTER T\nNOPE\nPING\n"),
    # -- the registry, over TCP
    "registered": same(HI, *REG, LOOKUP, CHANNELS, DEBUG, own("/nodes"), own("/topics"), END),
    "registered twice": same(HI, *REG, *REG, LOOKUP, DEBUG, END),
    "only the topic": same(HI, b"REGISTER T\n", 1, LOOKUP, CHANNELS, DEBUG, END),
    "only the channel": same(HI, b"REGISTER T c\n", 1, LOOKUP, CHANNELS, DEBUG, END),
    "a channel goes": same(HI, *REG, b"UNREGISTER T c\n", 1, LOOKUP, CHANNELS, DEBUG, END),
    "a topic goes": same(HI, *REG, b"UNREGISTER T\n", 1, LOOKUP, CHANNELS, DEBUG, own("/nodes"), END),
    "a producer goes": same(HI, *REG, gone, LOOKUP, CHANNELS, DEBUG, own("/topics")),
    "a producer errs": same(HI, *REG, END, gone, LOOKUP, CHANNELS, DEBUG),
    "what was never registered goes": same(
        HI, b"UNREGISTER T\nUNREGISTER T c\n", 2, LOOKUP, own("/topics"), END
    ),
    "an ephemeral channel goes": same(
        HI, b"REGISTER T c#ephemeral\nUNREGISTER T c#ephemeral\n", 2, LOOKUP, CHANNELS, END
    ),
    "an ephemeral topic goes": same(
        HI,
        b"REGISTER T#ephemeral\nUNREGISTER T#ephemeral\n",
        2,
        get("/lookup?topic=T%23ephemeral"),
        own("/topics"),
        END,
    ),
    "an ephemeral channel, and another has it still": same(
        HI,
        b"REGISTER T c#ephemeral\n",
        1,
        client("b"),
        introduced(),
        b"REGISTER T c#ephemeral\nUNREGISTER T c#ephemeral\n",
        2,
        CHANNELS,
        DEBUG,
        END,
        client(""),
        END,
    ),
    "ephemeral ones whose producer is gone": differs(
        "lookupd-ephemeral",
        HI,
        b"REGISTER T c#ephemeral\nREGISTER T#ephemeral c\n",
        2,
        gone,
        CHANNELS,
        own("/topics"),
        here=[
            *(IDENTIFIED, "OK", "OK"),
            'HTTP 200 {"channels":[]}',
            '/topics 200 {"found":["T"]}',
        ],
    ),
    "two producers": same(
        *(HI, *REG, client("b"), introduced(broadcast_address="other")),
        *(b"REGISTER T d\n", 1, LOOKUP, DEBUG, own("/nodes"), END, client(""), END),
    ),
    "a producer that drains": differs(
        "lookupd-draining",
        *(introduced(draining=True), *REG, LOOKUP, own("/nodes"), END),
        here=[
            *(IDENTIFIED, "OK", "OK", ENDED),
            'HTTP 200 {"channels":["c"],"producers":[{"remote_address":"PEER","hostname":"T","broadcast_address":"b",'
            '"tcp_port":4150,"http_port":4151,"version":"1.3.0","draining":true}]}',
            '/nodes 200 {"found":[{"broadcast_address":"b","draining":true,"hostname":"T","http_port":4151,'
            '"remote_address":"PEER","tcp_port":4150,"tombstones":[false],"topics":["T"],"version":"1.3.0"}]}',
        ],
    ),
    "a producer that leads a cluster": differs(
        "lookupd-cluster",
        *(introduced(cluster={"name": "prod", "member": "m", "epoch": 7}), *REG, LOOKUP, own("/nodes"), END),
        here=[
            *(IDENTIFIED, "OK", "OK", ENDED),
            'HTTP 200 {"channels":["c"],"producers":[{"remote_address":"PEER","hostname":"T","broadcast_address":"b",'
            '"tcp_port":4150,"http_port":4151,"version":"1.3.0",'
            '"cluster":{"name":"prod","member":"m","epoch":7}}]}',
            '/nodes 200 {"found":[{"broadcast_address":"b","cluster":{"epoch":7,"member":"m","name":"prod"},'
            '"hostname":"T","http_port":4151,"remote_address":"PEER","tcp_port":4150,"tombstones":[false],"topics":["T"],'
            '"version":"1.3.0"}]}',
        ],
    ),
    "a producer that does not drain": same(
        introduced(draining=False), *REG, LOOKUP, own("/nodes"), DEBUG, END
    ),
    # -- the registry, over HTTP
    "an unknown topic": same(LOOKUP, CHANNELS),
    "a topic made over HTTP": same(post("/topic/create?topic=T"), LOOKUP, CHANNELS, own("/topics"), DEBUG),
    "a channel made over HTTP": same(post("/channel/create?topic=T&channel=c"), LOOKUP, CHANNELS, DEBUG),
    "ephemeral ones made over HTTP": same(
        post("/channel/create?topic=T%23ephemeral&channel=c%23ephemeral"),
        get("/lookup?topic=T%23ephemeral"),
        own("/topics"),
    ),
    "made twice": same(post("/topic/create?topic=T"), post("/topic/create?topic=T"), LOOKUP),
    "a topic deleted over HTTP": same(
        *(HI, *REG, post("/topic/delete?topic=T"), LOOKUP, CHANNELS, own("/nodes"), DEBUG),
        *(b"REGISTER T\n", 1, LOOKUP, CHANNELS, DEBUG, b"UNREGISTER T c\n", 1, LOOKUP, END),
    ),
    "a channel deleted over HTTP": same(
        *(HI, *REG, post("/channel/delete?topic=T&channel=c"), LOOKUP, DEBUG),
        *(b"UNREGISTER T c\n", 1, b"REGISTER T c\n", 1, LOOKUP, DEBUG, END),
    ),
    "deleting what is not there": same(
        post("/topic/delete?topic=T"),
        post("/topic/delete?topic=%7C"),
        post("/channel/delete?topic=T&channel=c"),
        post("/topic/create?topic=T"),
        post("/channel/delete?topic=T&channel=c"),
    ),
    "a tombstone": same(
        *(HI, *REG, post("/topic/tombstone?topic=T&node=b:4151"), LOOKUP, own("/nodes")),
        *(b"REGISTER T\n", 1, LOOKUP, b"UNREGISTER T\nREGISTER T\n", 2, LOOKUP, own("/nodes"), END),
    ),
    "a tombstone for one of two topics": same(
        *(HI, b"REGISTER T\nREGISTER T.2\n", 2, post("/topic/tombstone?topic=T&node=b:4151")),
        *(LOOKUP, get("/lookup?topic=T.2"), own("/nodes"), END),
    ),
    "a tombstone for nobody": same(
        *(HI, *REG, post("/topic/tombstone?topic=T&node=b:4150"), post("/topic/tombstone?topic=T&node=")),
        *(post("/topic/tombstone?topic=T.no&node=b:4151"), LOOKUP, END),
    ),
    "a tombstone in /debug": same(
        *(HI, *REG, DEBUG, post("/topic/tombstone?topic=T&node=b:4151"), DEBUG, END),
    ),
    "a tombstone for an IPv6 address": differs(
        "lookupd-node",
        *(introduced(broadcast_address="::1"), b"REGISTER T\n", 1),
        *(post("/topic/tombstone?topic=T&node=[::1]:4151"), LOOKUP, END),
        here=[
            *(IDENTIFIED, "OK", ENDED, "HTTP 200 "),
            'HTTP 200 {"channels":[],"producers":[]}',
        ],
    ),
    "a tombstone for an IPv6 address without brackets": same(
        *(introduced(broadcast_address="::1"), b"REGISTER T\n", 1),
        *(post("/topic/tombstone?topic=T&node=::1:4151"), LOOKUP, END),
    ),
    # -- requests
    "profiles": differs(
        "lookupd-pprof", get("/debug/pprof/cmdline"), here=['HTTP 404 {"message":"NOT_FOUND"}']
    ),
    "ping and info": same(get("/ping"), get("/info")),
    "parameters that are missing": same(
        *(get("/lookup"), get("/channels"), post("/topic/create"), post("/topic/delete")),
        *(post("/topic/tombstone"), post("/topic/tombstone?topic=T"), post("/channel/create")),
        *(post("/channel/create?topic=T"), post("/channel/delete"), post("/channel/delete?topic=T")),
    ),
    "names that are none": same(
        *(post("/topic/create?topic=%7C"), post("/topic/create?topic="), post("/topic/create?topic=T%0A")),
        *(post("/channel/create?topic=%7C&channel=c"), post("/channel/create?topic=T&channel=%7C")),
        *(post("/channel/delete?topic=%7C&channel=c"), get("/lookup?topic=%7C"), get("/channels?topic=%7C")),
    ),
    "the wrong method": same(
        *(post("/lookup?topic=T"), get("/topic/create?topic=T"), http_request("PUT", "/ping")),
        http_request("HEAD", "/nodes"),
    ),
    "a path that there is not": same(get("/nowhere"), get("/stats"), get("/put")),
    "a path written otherwise": differs(
        "http-redirects",
        *(get("/lookup/?topic=T"), get("//Lookup?topic=T"), post("/Topic/Create")),
        here=["HTTP 301 ", "HTTP 301 ", "HTTP 307 "],
    ),
    "a query that is badly encoded": same(get("/lookup?topic=%zz"), post("/topic/create?topic=%zz")),
}
"""The scripts, by the behaviour they show."""

BOUNDS: dict[str, Script] = {
    "an overlong line": differs(
        "lookupd-bounds",
        b"PING" + b" " * 20_000 + b"\nPING\n",
        half_close,
        here=["E_INVALID line longer than 16384 bytes"],
    ),
    "an overlong IDENTIFY": differs(
        "lookupd-bounds",
        identify(hostname="h" * 65_600),
        half_close,
        here=["E_BAD_BODY IDENTIFY body too big 65699 > 65536"],
    ),
}
"""Limits that nsqlookupd does not have."""
