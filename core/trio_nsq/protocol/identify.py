"""IDENTIFY: the request, the settings that result from it, and the reply (NSQ protocol: IDENTIFY)."""

import json
from dataclasses import dataclass
from functools import lru_cache

from .errors import CommandError
from .go_json import decode_object
from .limits import Limits
from .names import is_valid_producer


@dataclass(frozen=True, slots=True)
class IdentifyRequest:
    """The JSON body of IDENTIFY. Missing fields are 0, False or "".

    Times are in milliseconds, sizes in bytes. -1 turns off heartbeats, output buffering or its timer.

    Attributes:
        survive_refusals: Not in nsqd: the broker keeps the connection if it cannot store a publish.
        private_channel: Not in nsqd: a channel that SUB creates starts at the end of the topic and does not count as
            its first channel.
        producer: Not in nsqd: the client numbers its publishes under this name; empty: it does not.
        producer_instance: Not in nsqd: a random name of this run of the producer.
        message_headers: Not in nsqd: the client gets messages with their headers, and wants to publish some.
        uncounted_requeues: Not in nsqd: REQ may say that the delivery counts as no attempt.
        topology_region, topology_zone: Where the client runs (nsqd 1.3.1); empty: unknown.
    """

    client_id: str = ""
    hostname: str = ""
    user_agent: str = ""
    feature_negotiation: bool = False
    heartbeat_interval: int = 0
    output_buffer_size: int = 0
    output_buffer_timeout: int = 0
    tls_v1: bool = False
    snappy: bool = False
    deflate: bool = False
    deflate_level: int = 0
    sample_rate: int = 0
    msg_timeout: int = 0
    survive_refusals: bool = False
    private_channel: bool = False
    producer: str = ""
    producer_instance: str = ""
    message_headers: bool = False
    uncounted_requeues: bool = False
    topology_region: str = ""
    topology_zone: str = ""


@dataclass(frozen=True, slots=True)
class IdentifySettings:
    """The settings of a connection after negotiation.

    Attributes:
        heartbeat_interval_ms: 0 means off.
        output_buffer_size: Bytes; 1 means unbuffered.
        output_buffer_timeout_ms: 0 means never flushed by time.
        sample_rate: The percentage of messages to deliver; 0 means all.
        msg_timeout_ms: The message timeout of this connection.
    """

    heartbeat_interval_ms: int
    output_buffer_size: int
    output_buffer_timeout_ms: int
    sample_rate: int
    msg_timeout_ms: int

    @staticmethod
    def default(limits: Limits) -> "IdentifySettings":
        """Return the settings of a connection that has not sent IDENTIFY."""
        return IdentifySettings(
            limits.heartbeat_interval_ms,
            limits.output_buffer_size,
            limits.output_buffer_timeout_ms,
            0,
            limits.msg_timeout_ms,
        )


_DEFLATE_LEVEL = 6
_SHORT_BYTES = 1024
_INT32 = range(-(2**31), 2**31)


def parse_identify(body: bytes) -> IdentifyRequest:
    """Decode an IDENTIFY body like Go, see `GoObject`; unknown fields are ignored. Raises CommandError."""
    return _parse_again(body) if len(body) <= _SHORT_BYTES else _parse(body)


@lru_cache(maxsize=256)  # a program sends the same body for each of its connections
def _parse_again(body: bytes) -> IdentifyRequest:
    return _parse(body)


def _parse(body: bytes) -> IdentifyRequest:
    try:
        given = decode_object(body)
        request = IdentifyRequest(
            client_id=given.text("client_id"),
            hostname=given.text("hostname"),
            user_agent=given.text("user_agent"),
            feature_negotiation=given.boolean("feature_negotiation"),
            heartbeat_interval=given.integer("heartbeat_interval"),
            output_buffer_size=given.integer("output_buffer_size"),
            output_buffer_timeout=given.integer("output_buffer_timeout"),
            tls_v1=given.boolean("tls_v1"),
            snappy=given.boolean("snappy"),
            deflate=given.boolean("deflate"),
            deflate_level=given.integer("deflate_level"),
            sample_rate=given.integer("sample_rate", _INT32),
            msg_timeout=given.integer("msg_timeout"),
            survive_refusals=given.boolean("survive_refusals"),
            private_channel=given.boolean("private_channel"),
            producer=given.text("producer"),
            producer_instance=given.text("producer_instance"),
            message_headers=given.boolean("message_headers"),
            uncounted_requeues=given.boolean("uncounted_requeues"),
            topology_region=given.text("topology_region"),
            topology_zone=given.text("topology_zone"),
        )
    except ValueError:
        raise CommandError("E_BAD_BODY", "IDENTIFY failed to decode JSON body") from None
    if request.producer and not (
        is_valid_producer(request.producer) and is_valid_producer(request.producer_instance)
    ):
        raise CommandError("E_BAD_BODY", "IDENTIFY producer or producer_instance is not valid")
    return request


def negotiate(request: IdentifyRequest, limits: Limits, before: IdentifySettings) -> IdentifySettings:
    """Return a connection's settings after a request; `before` has the values for missing fields.

    Raises:
        CommandError: `E_BAD_BODY` with the first value that is out of range; values are not clamped.
    """
    heartbeat_ms = request.heartbeat_interval
    if heartbeat_ms == -1:
        heartbeat_ms = 0
    elif heartbeat_ms == 0:
        heartbeat_ms = before.heartbeat_interval_ms
    elif not 1000 <= heartbeat_ms <= limits.max_heartbeat_interval_ms:
        raise CommandError("E_BAD_BODY", f"IDENTIFY heartbeat interval ({heartbeat_ms}) is invalid")

    timeout_ms = request.output_buffer_timeout
    if timeout_ms == -1:
        timeout_ms = 0
    elif timeout_ms == 0:
        timeout_ms = before.output_buffer_timeout_ms
    elif not limits.min_output_buffer_timeout_ms <= timeout_ms <= limits.max_output_buffer_timeout_ms:
        raise CommandError("E_BAD_BODY", f"IDENTIFY output buffer timeout ({timeout_ms}) is invalid")

    size = request.output_buffer_size
    if size == -1:
        size, timeout_ms = 1, 0
    elif size == 0:
        size = before.output_buffer_size
    elif not 64 <= size <= limits.max_output_buffer_size:
        raise CommandError("E_BAD_BODY", f"IDENTIFY output buffer size ({size}) is invalid")

    if not 0 <= request.sample_rate <= 99:
        raise CommandError("E_BAD_BODY", f"IDENTIFY sample rate ({request.sample_rate}) is invalid")

    msg_timeout_ms = request.msg_timeout
    if msg_timeout_ms == 0:
        msg_timeout_ms = before.msg_timeout_ms
    elif not 1000 <= msg_timeout_ms <= limits.max_msg_timeout_ms:
        raise CommandError("E_BAD_BODY", f"IDENTIFY msg timeout ({msg_timeout_ms}) is invalid")

    return IdentifySettings(heartbeat_ms, size, timeout_ms, request.sample_rate, msg_timeout_ms)


@dataclass(frozen=True, slots=True)
class Upgrades:
    """The layers that are added to a connection after the reply to IDENTIFY: TLS first, then compression.

    Attributes:
        deflate_level: 1..9; also set when `deflate` is false, like nsqd.
    """

    tls: bool = False
    snappy: bool = False
    deflate: bool = False
    deflate_level: int = 6

    @property
    def any(self) -> bool:
        """Whether a layer is added."""
        return self.tls or self.snappy or self.deflate


def choose_upgrades(request: IdentifyRequest, limits: Limits, *, tls: bool) -> Upgrades:
    """Return the granted upgrades of a request; `tls` is whether the broker has a certificate.

    Raises:
        CommandError: `E_IDENTIFY_FAILED`: the request has two compressions.
    """
    snappy = request.snappy and limits.snappy
    deflate = request.deflate and limits.deflate
    if snappy and deflate:
        raise CommandError("E_IDENTIFY_FAILED", "cannot enable both deflate and snappy compression")
    level = request.deflate_level if deflate and request.deflate_level > 0 else _DEFLATE_LEVEL
    return Upgrades(request.tls_v1 and tls, snappy, deflate, min(level, limits.max_deflate_level))


def identify_reply(
    request: IdentifyRequest,
    settings: IdentifySettings,
    upgrades: Upgrades,
    limits: Limits,
    version: str,
    *,
    auth_required: bool,
    region: str = "",
    zone: str = "",
) -> bytes:
    """Encode the JSON reply for feature negotiation, with keys in nsqd's order.

    Fields that nsqd 1.3.0 does not have are sent only to clients that requested them. `region` and `zone` are the
    broker's.
    """
    reply: dict[str, object] = {
        "max_rdy_count": limits.max_rdy_count,
        "version": version,
        "max_msg_timeout": limits.max_msg_timeout_ms,
        "msg_timeout": settings.msg_timeout_ms,
        "tls_v1": upgrades.tls,
        "deflate": upgrades.deflate,
        "deflate_level": upgrades.deflate_level,
        "max_deflate_level": limits.max_deflate_level,
        "snappy": upgrades.snappy,
        "sample_rate": settings.sample_rate,
        "auth_required": auth_required,
        "output_buffer_size": settings.output_buffer_size,
        "output_buffer_timeout": settings.output_buffer_timeout_ms,
    }
    if request.topology_region or request.topology_zone:
        reply |= {"topology_region": region, "topology_zone": zone}
    if request.survive_refusals:
        reply["survive_refusals"] = True
    if request.private_channel:
        reply["private_channel"] = True
    if request.producer:
        reply["producer"] = request.producer
    if request.message_headers:
        reply["message_headers"] = True
    if request.uncounted_requeues:
        reply["uncounted_requeues"] = True
    return json.dumps(reply, separators=(",", ":")).encode()
