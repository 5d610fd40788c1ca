"""A fleet with something on every page of the console: what operators have, and what strangers send.

| topic | contents |
|---|---|
| `clicks` | JSON messages on all brokers; consumers on `archive` with TLS, compression, a sample rate; none on `mail` |
| `orders` | messages that are due in an hour, on all brokers; `billing` is paused |
| `payments` | six messages that failed on `charge`; they are in `payments.dead` |
| `hostile` | bodies that would run, break the layout or take long, if they were not shown as plain text |
| `logs` | no channel |
| `kept` | no broker; a discovery service has a channel of it |
| `nowhere` | a producer that is no broker, with a hostile address: registered at the real nsqlookupd |

The names `LONGEST` and `DOTS` are topics, too. `messages` and `settings` are channels of `clicks`.
"""

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from struct import pack, unpack
from typing import Any

from cli.support import Cli, fail_messages
from fleet.support import DEADLINE_S, Fleet, running_fleet, subscribed, wait_until
from interop.peers import CLIENTS, Broker
from interop.same.certificates import Certificates

LONGEST = "n" * 64
DOTS = ".."
"""A valid name that a URL cannot have as a segment of its path."""
ALIKE = ("messages", "settings")
"""Channels with the names of pages."""

MARKUP = "</td></script><script>alert('ran')</script><img src=x onerror=alert('ran')>\"'`{{7*7}}${7*7}&lt;"
RTL = "\u202eabc \u05d0\u05d1\u05d2 \u0627\u0644 \u2066end"
HOSTILE_BODIES = [
    MARKUP.encode(),
    json.dumps({MARKUP: [MARKUP, {"__proto__": MARKUP}], "url": "javascript:alert(1)"}).encode(),
    RTL.encode(),
    b"\xff\xfe\x00\x80 invalid UTF-8 \xc3(",
    bytes(range(256)) * 4,
    b"x" * (1024 * 1024 - 1),
    b"[" * 20_000 + b"]" * 20_000,
    b'{"number": 12345678901234567890.123456789, "number": 1e999, "nan": NaN}',
    b"\x1b]0;title\x07\x1b[2J\x1b[31mred",
    b"one\ntwo\r\nthree\n" * 2000,
    b"\x00" * 5000,
]
HOSTILE_IDENTITY: dict[str, Any] = {
    "client_id": MARKUP,
    "hostname": RTL + "h" * 3000,
    "user_agent": f"{MARKUP}/{'a' * 3000}",
}


@dataclass(frozen=True)
class LivelyFleet:
    """The fleet, and the certificates of its brokers."""

    fleet: Fleet
    certificates: Certificates


@contextmanager
def lively_fleet(folder: Path) -> Iterator[LivelyFleet]:
    """Run the fleet of this module until the block exits. Its data is in `folder`."""
    certificates = Certificates.make(folder / "certificates")
    with (
        running_fleet(folder, *certificates.flags, ours=2, nsqd_flags=certificates.flags) as fleet,
        ExitStack() as consumers,
    ):
        _clicks(fleet)
        _orders(fleet)
        _payments(fleet)
        _hostile(fleet)
        fleet.create("logs")
        for name in (LONGEST, DOTS):
            fleet.create(name, name)
        fleet.lookupds[0].http("POST", "/topic/create", topic="kept")
        fleet.lookupds[0].http("POST", "/channel/create", topic="kept", channel="someday")
        _consume(fleet, certificates, consumers)
        yield LivelyFleet(fleet, certificates)


def _clicks(fleet: Fleet) -> None:
    fleet.create("clicks", "archive", "mail", *ALIKE)
    for number, broker in enumerate(fleet.brokers, 1):
        bodies = [
            json.dumps({"user": f"u{each % 97}", "path": f"/page/{each}", "ms": each % 13}).encode()
            for each in range(100 * number)
        ]
        Cli("", broker.http_address).publish("clicks", bodies)


def _orders(fleet: Fleet) -> None:
    fleet.create("orders", "billing")
    for broker in fleet.brokers:
        for each in range(3):
            broker.post("/pub", b'{"order": %d}' % each, topic="orders", defer=3_600_000 - each * 600_000)
        broker.post("/pub", b'{"order": "now"}', topic="orders")
        broker.http("POST", "/channel/pause", topic="orders", channel="billing")


def _payments(fleet: Fleet) -> None:
    fleet.create("payments", "charge")
    failing = fleet.ours[0]
    failing.put(
        "/channel/settings",
        b'{"max_attempts": 1, "dead_letter_topic": "payments.dead"}',
        topic="payments",
        channel="charge",
    )
    for each in range(6):
        failing.post("/pub", b'{"payment": %d}' % each, topic="payments")
    fail_messages(failing.tcp_address, "payments", "charge", 6)
    wait_until(partial(_has_messages, failing, "payments.dead", 6), "the dead letters arrived")


def _hostile(fleet: Fleet) -> None:
    fleet.create("hostile", "reader")
    for broker in (fleet.ours[0], fleet.nsqd):
        Cli("", broker.http_address).publish("hostile", HOSTILE_BODIES, at_once=1)


def _consume(fleet: Fleet, certificates: Certificates, consumers: ExitStack) -> None:
    """Connect consumers that hold a message each and take no other, and hostile ones."""
    go = next(client for client in CLIENTS if client.name == "go-nsq")
    tls = ["--tls", f"--ca={certificates.ca}"]
    for broker, flags in ((fleet.ours[0], [*tls, "--snappy"]), (fleet.nsqd, [*tls, "--deflate"])):
        consumer = consumers.enter_context(
            go.subscribe(
                broker.tcp_address,
                "clicks",
                "archive",
                1000,
                max_in_flight=2,
                hold_first=True,
                connection=[*flags, "--timeout=3600"],
            )
        )
        consumer.next()
    for broker in fleet.brokers:
        consumers.enter_context(subscribed(broker, "clicks", "archive", ready=3, sample_rate=50))
        consumers.enter_context(subscribed(broker, "hostile", "reader", **HOSTILE_IDENTITY))
    consumers.enter_context(registered(fleet.lookupds[1], MARKUP, "nowhere"))


@contextmanager
def registered(lookupd: Broker, broadcast_address: str, topic: str) -> Iterator[None]:
    """Register a producer that is no broker at a discovery service, until the block exits."""
    host, _, port = lookupd.tcp_address.rpartition(":")
    identity = {
        "broadcast_address": broadcast_address,
        "hostname": broadcast_address,
        "tcp_port": 1,
        "http_port": 1,
        "version": broadcast_address,
    }
    sent = json.dumps(identity).encode()
    with (
        socket.create_connection((host, int(port)), timeout=DEADLINE_S) as sock,
        sock.makefile("rb") as answers,
    ):
        sock.sendall(b"  V1IDENTIFY\n" + pack(">I", len(sent)) + sent)
        answers.read(unpack(">I", answers.read(4))[0])
        sock.sendall(f"REGISTER {topic}\n".encode())
        assert answers.read(unpack(">I", answers.read(4))[0]) == b"OK"
        yield


def _has_messages(broker: Broker, topic: str, count: int) -> bool:
    stats = json.loads(broker.http("GET", "/stats", format="json", topic=topic))
    return sum(int(each["message_count"]) for each in stats["topics"]) >= count
