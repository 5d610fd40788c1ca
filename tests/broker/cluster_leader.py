"""A broker that leads a cluster, in the test's trio run, and connections of its members."""

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import trio

from broker.certificates import Certificates
from broker.support import PATIENCE_S
from trio_nsq.access.secret import NO_SECRET
from trio_nsq.broker import BoundAddresses, BrokerOptions, serve
from trio_nsq.broker.replication import Replication
from trio_nsq.http.upgrade import open_upgraded

UPGRADE = b"Connection: Upgrade\r\nUpgrade: trio-nsq-cluster\r\n"


class Leader:
    """A running leader; `context` is that of its clients."""

    def __init__(self, bound: BoundAddresses, replication: Replication, context: ssl.SSLContext) -> None:
        self.bound = bound
        self.replication = replication
        self.context = context

    @asynccontextmanager
    async def upgraded(
        self, target: str, token: str = "", *, tls: bool = False, status: int = 101
    ) -> AsyncIterator[Any]:
        """Ask for the other protocol; yields the stream after the answer, which must have this status."""
        address = str(self.bound.https_address if tls else self.bound.http_address)
        host, _, port = address.rpartition(":")
        stream: Any = await trio.open_tcp_stream(host, int(port))
        if tls:
            stream = trio.SSLStream(stream, self.context, server_hostname="127.0.0.1", https_compatible=True)
        async with stream:
            about = f"Authorization: {token}\r\n".encode() if token else b""
            await stream.send_all(
                b"GET %b HTTP/1.1\r\nHost: 127.0.0.1\r\n%b%b\r\n" % (target.encode(), UPGRADE, about)
            )
            head = b""
            with trio.fail_after(PATIENCE_S):
                while not head.endswith(b"\r\n\r\n"):
                    more = await stream.receive_some(1)
                    assert more, head
                    head += more
            assert head.startswith(b"HTTP/1.1 %d " % status), head
            yield stream

    async def open(self, target: str, *, tls: bool, **more: Any) -> trio.abc.HalfCloseableStream:
        """Connect as members do."""
        address = f"https://{self.bound.https_address}" if tls else f"http://{self.bound.http_address}"
        options: dict[str, Any] = {"secret": NO_SECRET, "tls": self.context, "timeout_s": PATIENCE_S} | more
        return await open_upgraded(address, target, **options)


@asynccontextmanager
async def leading(folder: Path, certificates: Certificates, **options: Any) -> AsyncIterator[Leader]:
    """Run a leader on free loopback ports."""
    addresses = dict.fromkeys(("tcp_address", "http_address", "https_address"), "127.0.0.1:0")
    settings = BrokerOptions(data_path=folder, **(addresses | certificates.options | options))
    replication = Replication(folder, "prod", "one", 1)
    async with trio.open_nursery() as serving:
        with trio.fail_after(3 * PATIENCE_S):
            bound: BoundAddresses = await serving.start(partial(serve, settings, replication=replication))
            yield Leader(bound, replication, certificates.client_context())
            serving.cancel_scope.cancel()
