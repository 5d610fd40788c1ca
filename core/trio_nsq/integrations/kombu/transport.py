"""The transport: a connection of kombu, with one socket for publishing and one for each source that is consumed."""

import logging
import os
import select
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import closing
from dataclasses import fields
from typing import Any

from kombu.transport import virtual

from ..._version import __version__
from ...api import broker as api
from ...client.connection.options import OFF, ConnectionSettings, renamed_options
from ...client.connection.tls import TLSFiles
from ...client.errors import (
    BrokerError,
    BrokerUnreachable,
    ConnectionFailed,
    ConnectionLost,
    PublishFailed,
    RequestRefused,
    is_auth_refusal,
)
from ...client.http.broker_http import BrokerHTTP
from ...protocol.address import format_address, next_port
from ...protocol.encode import encode_dpub, encode_pub
from ...protocol.limits import SECOND_MS, Limits
from .broker_socket import BrokerSocket
from .channel import Channel as NSQChannel
from .subscription import Source, Subscription

DEFAULT_CHANNEL = "celery"
PUBLISH_TIMEOUT_S = 30.0
_logger = logging.getLogger("trio_nsq.kombu")
_SLICE_S = 1.0
"""How long a wait does not notice new subscriptions, and lost connections that another thread has noticed."""
_TLS_NAMES = {"ca_certs": "tls_root_ca_file", "certfile": "tls_cert", "keyfile": "tls_key"}


class Transport(virtual.Transport):  # type: ignore[misc]  # kombu has few types
    """A transport of kombu to one broker, `qcli serve` or nsqd.

    A queue is a topic, and its consumers share a channel of it, `celery`. Names that NSQ refuses are replaced by
    similar ones that end in a hash. A direct exchange needs nothing of its own: the publisher puts the message into the
    topics of the queues that it has declared. A fanout exchange is an ephemeral topic, of which each queue is a
    channel; so are topic exchanges and exchanges that are not durable for queues that delete themselves, such as those
    of Celery's events and remote control.

    Messages are acknowledged with FIN, and requeued with REQ. Until then, a thread extends their timeout (TOUCH) up to
    the broker's `--max-msg-timeout`, and answers for the connection while the program is busy. The prefetch count is
    shared among the queues as RDY. A task with an ETA is published with DPUB, and comes to a worker when it is due.

    After a fork, the child closes its copies of the sockets; kombu opens others there.

    `transport_options` may have the names of `ConnectionSettings`, and

    - `channel`: the NSQ channel of the queues; default `celery`.
    - `visibility_timeout`: the message timeout in seconds, at least 1; default: the broker's.
    - `max_defer_s`: the longest delay of a task in the broker, in seconds; a longer one is deferred again. Default:
      3600, which nsqd accepts (`--max-req-timeout`).
    - `publish_timeout_s`: how long a publish waits for its acknowledgement, in seconds; default 30.
    - `nsqd_http_address`: `host:port` of the HTTP API, for sizes and purges; default: the port after the TCP port.

    Others are ignored: kombu and Celery have some of their own.

    Raises:
        ValueError: An option is invalid.
        TypeError: An option has another type.
    """

    Channel = NSQChannel

    default_port = 4150
    driver_type = "nsq"
    driver_name = "trio-nsq"
    implements = virtual.Transport.implements.extend(
        asynchronous=True, exchange_type=frozenset(["direct", "topic", "fanout"]), heartbeats=False
    )
    connection_errors = (
        *virtual.Transport.connection_errors,
        OSError,
        ConnectionFailed,
        ConnectionLost,
        PublishFailed,
        BrokerUnreachable,
    )
    channel_errors = (*virtual.Transport.channel_errors, BrokerError)
    recoverable_connection_errors = connection_errors
    recoverable_channel_errors: tuple[type[Exception], ...] = ()

    def __init__(self, client: Any, **arguments: Any) -> None:
        super().__init__(client, **arguments)
        options = client.transport_options
        self._start_threads_anew()
        self.transient: set[str] = set()  # the queues that delete themselves
        self.nsq_channel: str = options.get("channel", DEFAULT_CHANNEL)
        self.max_defer_s: float = float(options.get("max_defer_s", Limits().max_req_timeout_ms / SECOND_MS))
        self._publish_timeout_s = float(options.get("publish_timeout_s", PUBLISH_TIMEOUT_S))
        self._address = format_address(client.hostname or "localhost", client.port or self.default_port)
        self._settings = _settings_of(client)
        self._publisher: BrokerSocket | None = None
        self._receiving: dict[Subscription, NSQChannel] = {}
        self._registered: dict[int, Subscription] = {}  # in the event loop, by descriptor
        self._loop: Any = None
        _all.add(self)

    def _start_threads_anew(self) -> None:
        self.lock = threading.RLock()
        self._publish_lock = threading.Lock()
        self._closed = threading.Event()
        self._keeper: threading.Thread | None = None

    def forget_parent(self) -> None:
        """After a fork, in the child: the parent's threads do not exist here, and may have held the locks."""
        self._receiving.clear()
        self._registered.clear()
        self._start_threads_anew()

    def driver_version(self) -> str:
        return __version__

    # ------------------------------------------------------------------------------------------ connection

    def establish_connection(self) -> "Transport":
        """Connect. Raises ConnectionFailed."""
        self._publisher = self._connect_publisher()
        super().establish_connection()
        return self

    def close_connection(self, connection: Any) -> None:
        """Close the channels, which returns what is not acknowledged, and disconnect."""
        for channel in {*self.channels, *self._avail_channels}:
            channel.close()
        self._avail_channels.clear()
        self._closed.set()
        if self._publisher is not None:
            self._publisher.close()

    def _connect_publisher(self) -> BrokerSocket:
        return BrokerSocket(self._address, self._settings_with(heartbeat_interval_s=OFF, msg_timeout_s=0))

    def _settings_with(self, **changes: Any) -> ConnectionSettings:
        return ConnectionSettings(
            **{each.name: getattr(self._settings, each.name) for each in fields(self._settings)} | changes
        )

    # ------------------------------------------------------------------------------------------ publishing

    def publish(self, topic: str, body: bytes, wait_s: float = 0) -> None:
        """Publish a message and wait until the broker has stored it.

        Args:
            wait_s: The delay before the delivery; the consumer defers what remains after `max_defer_s`.

        Raises:
            BrokerError: The broker refuses the message.
            ConnectionFailed: No broker answers.
            PublishFailed: It is not acknowledged; `maybe_stored` says whether it may be stored.
        """
        defer_ms = round(min(wait_s, self.max_defer_s) * SECOND_MS)
        command = encode_dpub(topic, defer_ms, body) if defer_ms else encode_pub(topic, body)
        with self._publish_lock:
            publisher = self._live_publisher()
            try:
                publisher.ask(command, self._publish_timeout_s)
            except BrokerError as error:
                publisher.close()  # the broker does so, too
                # Such as a full disk, or an auth server that does not answer, for a while.
                if error.code.endswith("_FAILED") and not is_auth_refusal(error):
                    raise PublishFailed(str(error), maybe_stored=False) from error
                raise
            except ConnectionLost as error:
                raise PublishFailed(str(error), maybe_stored=True) from error

    def _live_publisher(self) -> BrokerSocket:
        """Return a connection that the broker has not closed since the last publish."""
        publisher = self._publisher
        if publisher is not None and publisher.is_open:
            try:
                if publisher.wait(0):  # only its end can arrive, as it was idle
                    publisher.close()
            except ConnectionLost:
                pass
        if publisher is None or not publisher.is_open:
            self._publisher = publisher = self._connect_publisher()
        return publisher

    # ------------------------------------------------------------------------------------------- consuming

    def subscribe(self, channel: NSQChannel, source: Source) -> Subscription:
        """Open a subscription whose messages go to a channel. Raises ConnectionFailed."""
        subscription = Subscription(self._address, self._settings, source)
        self._receiving[subscription] = channel
        if self._keeper is None:
            self._keeper = threading.Thread(target=self._keep_alive, name="trio_nsq kombu", daemon=True)
            self._keeper.start()
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        """Return its messages to the broker, and close it."""
        self._receiving.pop(subscription, None)
        for descriptor, registered in [*self._registered.items()]:
            if registered is subscription:
                del self._registered[descriptor]
                if self._loop is not None:
                    self._loop.remove(descriptor)
        subscription.close()

    def _keep_alive(self) -> None:
        interval_s = _SLICE_S
        while not self._closed.wait(interval_s):
            interval_s = _SLICE_S
            for subscription in [*self._receiving]:
                interval_s = min(interval_s, subscription.socket.msg_timeout_s / 6)
                try:
                    subscription.keep_alive()
                except Exception:  # a bug must not end the thread
                    _logger.exception("a connection was not kept alive")

    def wait(self, subscriptions: Sequence[Subscription], timeout_s: float) -> list[Subscription]:
        """Wait until something has arrived; return where. Raises ConnectionLost."""
        if not subscriptions:
            time.sleep(timeout_s)
            return []
        if ready := [each for each in subscriptions if each.has_arrived]:
            return ready
        poller = select.poll()
        by_descriptor = {}
        for subscription in subscriptions:
            subscription.socket.check_heartbeats()
            subscription.socket.flush()
            descriptor = subscription.socket.fileno()
            by_descriptor[descriptor] = subscription
            poller.register(descriptor, select.POLLIN)
        return [by_descriptor[descriptor] for descriptor, _ in poller.poll(timeout_s * SECOND_MS)]

    def drain_events(self, connection: Any, timeout: float | None = None) -> None:
        """Wait for messages and pass them on.

        Raises:
            TimeoutError: None has arrived within this time, in seconds; None: it waits without limit.
            ConnectionLost: The connection is lost.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left_s = _SLICE_S if deadline is None else deadline - time.monotonic()
            ready = self.wait([*self._receiving], max(0.0, min(left_s, _SLICE_S)))
            delivered = 0
            for subscription in ready:
                delivered += self._receive(subscription)
            if delivered:
                return
            if left_s <= 0:
                raise TimeoutError("no message has arrived")

    def _receive(self, subscription: Subscription) -> int:
        channel = self._receiving.get(subscription)  # None: another one's message has closed it
        return 0 if channel is None else channel.receive(subscription)

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        """Receive in kombu's event loop."""
        self._loop = loop

        def register() -> None:
            if self._closed.is_set():
                loop.on_tick.discard(register)
                return
            for subscription in [*self._receiving]:
                if subscription.has_arrived:
                    self._receive(subscription)
                    continue
                subscription.socket.check_heartbeats()
                subscription.socket.flush()
                descriptor = subscription.socket.fileno()
                if self._registered.get(descriptor) is not subscription or descriptor not in loop.readers:
                    self._registered[descriptor] = subscription
                    loop.add_reader(descriptor, self._receive, subscription)

        loop.on_tick.add(register)

    def unregister_from_event_loop(self, connection: Any, loop: Any) -> None:
        for descriptor in self._registered:
            loop.remove(descriptor)
        self._registered.clear()
        self._loop = None

    # ------------------------------------------------------------------------------------------------ HTTP

    def depth(self, topic: str, channel: str) -> int:
        """Return how many messages wait, are deferred or in flight; 0 if the topic does not exist.

        Raises BrokerUnreachable or RequestRefused.
        """
        with closing(self._http()) as http:
            topics = http.ask(api.stats(topic))["topics"]
        return sum(
            found["depth"]  # what no channel has taken
            + sum(
                each["depth"] + each["in_flight_count"] + each["deferred_count"]
                for each in found["channels"]
                if each["channel_name"] == channel
            )
            for found in topics
        )

    def purge(self, topic: str, channel: str) -> int:
        """Empty a channel and what its topic has for it; return how many messages it had.

        Raises BrokerUnreachable or RequestRefused.
        """
        count = self.depth(topic, channel)
        with closing(self._http()) as http:
            for name in (None, channel):  # nsqd keeps what no channel has taken in the topic
                try:
                    http.ask(api.act("empty", topic, name))
                except RequestRefused as error:
                    if error.status != 404:
                        raise
        return count

    def _http(self) -> BrokerHTTP:
        settings = self._settings
        address = self.client.transport_options.get("nsqd_http_address") or next_port(self._address)
        tls = TLSFiles(
            settings.tls_root_ca_file, settings.tls_cert, settings.tls_key, settings.tls_insecure_skip_verify
        )
        return BrokerHTTP(address, settings.tls_context or tls, settings.secret)


_all: "weakref.WeakSet[Transport]" = weakref.WeakSet()


def _forget_parents() -> None:
    for transport in [*_all]:
        transport.forget_parent()


os.register_at_fork(after_in_child=_forget_parents)


def _settings_of(client: Any) -> ConnectionSettings:
    """Return the settings of consumers. Raises TypeError or ValueError."""
    known = {each.name for each in fields(ConnectionSettings)}
    options = renamed_options(known, client.transport_options)
    found = {name: value for name, value in options.items() if name in known}
    found.setdefault("dial_timeout_s", client.connect_timeout or 5.0)
    found.setdefault("output_buffer_timeout_s", 0.025)
    if (visible_s := client.transport_options.get("visibility_timeout")) is not None:
        found["msg_timeout_s"] = visible_s
    if (secret := client.password) and "auth_secret_file" not in found:
        found.setdefault("auth_secret", secret)
    if client.ssl:
        found["tls_v1"] = True
        given = client.ssl if isinstance(client.ssl, dict) else {}
        given = {name.removeprefix("ssl_"): value for name, value in given.items()}
        for name, option in _TLS_NAMES.items():
            if given.get(name):
                found.setdefault(option, given[name])
        if "cert_reqs" in given and not given["cert_reqs"]:  # ssl.CERT_NONE
            found.setdefault("tls_insecure_skip_verify", True)
    return ConnectionSettings(**found)
