"""IDENTIFY: what a client asks for, what it gets, and the reply that says so (NSQ protocol: IDENTIFY)."""

import json
import math
import re
from dataclasses import dataclass, fields
from typing import Any

from .errors import CommandError
from .limits import Limits


@dataclass(frozen=True, slots=True)
class IdentifyRequest:
    """The JSON body of IDENTIFY. Zero, False and "" stand for "not said".

    Times are in milliseconds, sizes in bytes. -1 turns heartbeats, output buffering or its timer off.

    Attributes:
        survive_refusals: Ours alone: a publish that cannot be stored does not end the connection.
        private_channel: Ours alone: a channel that SUB makes begins at the end of the topic, and does not count as its
            first channel.
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


@dataclass(frozen=True, slots=True)
class IdentifySettings:
    """What is in force for a connection after negotiation.

    Attributes:
        heartbeat_interval_ms: 0 means off.
        output_buffer_size: Bytes; 1 means unbuffered.
        output_buffer_timeout_ms: 0 means never flushed by time.
        sample_rate: Percent of messages wanted; 0 means all.
        msg_timeout_ms: In-flight time of a message on this connection.
    """

    heartbeat_interval_ms: int
    output_buffer_size: int
    output_buffer_timeout_ms: int
    sample_rate: int
    msg_timeout_ms: int

    @staticmethod
    def default(limits: Limits) -> "IdentifySettings":
        """What a connection has that never sent IDENTIFY."""
        return negotiate(IdentifyRequest(), limits)


_FIELDS: dict[str, type] = {f.name: type(f.default) for f in fields(IdentifyRequest)}
_DEFLATE_LEVEL = 6
_MAX_DIGITS = 20
_LONE_SURROGATE = re.compile(r"[\ud800-\udfff]")


class _Object(list[tuple[str, Any]]):
    """A JSON object with all its keys, those that occur twice included."""


def _integer(digits: str) -> float:
    """An integer; infinity for one longer than any we want, which Python would be slow to read, or refuse."""
    return int(digits) if len(digits) <= _MAX_DIGITS else math.inf


def _beyond(name: str) -> int:
    """The first number that does not fit into nsqd's integer of that name, and so is of the wrong type."""
    return 2**31 if name == "sample_rate" else 2**63


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def parse_identify(body: bytes) -> IdentifyRequest:
    """Decode an IDENTIFY body as Go would.

    Keys are known in any case and unknown ones ignored; of keys that occur twice the last counts, but each must
    have the right type; `null` is the same as leaving out, also for the whole body.

    Raises:
        CommandError: `E_BAD_BODY`, for anything but a JSON object with values of the right types.
    """
    bad = CommandError("E_BAD_BODY", "IDENTIFY failed to decode JSON body")
    try:
        # As Go: what is not UTF-8 becomes U+FFFD. (Given bytes, json would take UTF-16 and others for JSON, too.)
        decoded: Any = json.loads(
            body.decode("utf-8", "replace"),
            object_pairs_hook=_Object,
            parse_int=_integer,
            parse_constant=_refuse_constant,
        )
    except (ValueError, RecursionError):
        raise bad from None
    if decoded is None:
        return IdentifyRequest()
    if not isinstance(decoded, _Object):
        raise bad
    known: dict[str, Any] = {}
    for key, value in decoded:
        name = key.lower().replace("\u017f", "s")  # the long s: Go folds case as Unicode says
        wanted = _FIELDS.get(name)
        if wanted is None or value is None:
            continue
        # bool is an int to Python, not to the protocol; a float, even a whole one, is not an int to either.
        if type(value) is not wanted:
            raise bad
        if isinstance(value, str):
            value = _LONE_SURROGATE.sub("\ufffd", value)
        elif isinstance(value, int) and not -_beyond(name) <= value < _beyond(name):
            raise bad
        known[name] = value
    return IdentifyRequest(**known)


def negotiate(
    request: IdentifyRequest, limits: Limits, before: IdentifySettings | None = None
) -> IdentifySettings:
    """Settle a connection's settings.

    Args:
        before: What was settled before and stays where the request says nothing; None: the defaults.

    Raises:
        CommandError: `E_BAD_BODY` naming the first value out of range; nothing is clamped.
    """
    if before is None:
        before = IdentifySettings(
            limits.heartbeat_interval_ms,
            limits.output_buffer_size,
            limits.output_buffer_timeout_ms,
            0,
            limits.msg_timeout_ms,
        )
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
    """What a connection is to become after the reply to IDENTIFY, in this order: TLS, then compression.

    Attributes:
        deflate_level: 1..9; filled in also when `deflate` is false, as nsqd does.
    """

    tls: bool = False
    snappy: bool = False
    deflate: bool = False
    deflate_level: int = 6


def choose_upgrades(request: IdentifyRequest, limits: Limits, *, tls: bool) -> Upgrades:
    """Settle what of the upgrades that a client asks for it gets.

    Args:
        tls: Whether the broker has a certificate.

    Raises:
        CommandError: `E_IDENTIFY_FAILED`: two compressions at once.
    """
    snappy = request.snappy and limits.snappy
    deflate = request.deflate and limits.deflate
    if snappy and deflate:
        raise CommandError("E_IDENTIFY_FAILED", "cannot enable both deflate and snappy compression")
    level = request.deflate_level if deflate and request.deflate_level > 0 else _DEFLATE_LEVEL
    return Upgrades(request.tls_v1 and tls, snappy, deflate, min(level, limits.max_deflate_level))


def identify_reply(
    settings: IdentifySettings,
    upgrades: Upgrades,
    limits: Limits,
    version: str,
    *,
    auth_required: bool,
    survive_refusals: bool = False,
    private_channel: bool = False,
) -> bytes:
    """The JSON reply to a client that asked for feature negotiation, keys in nsqd's order.

    What nsqd does not know is told only to those who asked for it.
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
    if survive_refusals:
        reply["survive_refusals"] = True
    if private_channel:
        reply["private_channel"] = True
    return json.dumps(reply, separators=(",", ":")).encode()
