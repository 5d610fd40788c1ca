"""The options of a connection, shared by consumers and producers."""

import socket
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from inspect import getmembers, isfunction, signature
from typing import Any, TypedDict

from trio_nsq._version import __version__
from trio_nsq.protocol.limits import KIB, SECOND_MS
from trio_nsq.text.arguments import MAX_SECONDS, check_number, check_options, in_milliseconds, warn_deprecated

from ...access.secret import Secret, StrPath
from ..hooks import Hooks, installed_hooks
from .tls import TLSFiles

OFF = -1
"""Turns heartbeats or output buffering off."""
IN_MILLISECONDS = frozenset(
    {
        "heartbeat_interval_ms",
        "msg_timeout_ms",
        "output_buffer_timeout_ms",
        "default_requeue_delay_ms",
        "max_requeue_delay_ms",
        "max_req_timeout_ms",
    }
)
"""Deprecated names of options, whose values are in milliseconds; today's end in `_s`."""


class ConnectionOptions(TypedDict, total=False):
    """The keyword arguments that `Consumer` and `Producer` share; see `ConnectionSettings`."""

    dial_timeout_s: float
    heartbeat_interval_s: float
    msg_timeout_s: float
    sample_rate: int
    output_buffer_size: int
    output_buffer_timeout_s: float
    client_id: str
    hostname: str
    user_agent: str
    topology_region: str
    topology_zone: str
    tls_v1: bool
    tls_root_ca_file: StrPath | None
    tls_cert: StrPath | None
    tls_key: StrPath | None
    tls_insecure_skip_verify: bool
    tls_context: ssl.SSLContext | None
    snappy: bool
    deflate: bool
    deflate_level: int
    auth_secret: str
    auth_secret_file: StrPath | None
    hooks: Hooks | None


def _short_hostname() -> str:
    return socket.gethostname().partition(".")[0]


@dataclass(frozen=True, slots=True)
class ConnectionSettings:
    """Settings of a connection, with the Go client's names and defaults.

    A broker may have tighter limits; it then refuses the connection with a reason.

    Attributes:
        dial_timeout_s: The timeout for the TCP connection, including the name lookup.
        heartbeat_interval_s: The broker's heartbeat interval, at least 1. After twice this time without data, the
            connection counts as lost. -1: no heartbeats, and a dead peer is not detected; not for consumers.
        msg_timeout_s: How long the broker waits for an answer to a message before it delivers it again, at least
            1; 0: the broker's default (one minute in nsqd).
        sample_rate: The percentage of the channel's messages to receive, up to 99; the broker drops the others. 0: all.
        output_buffer_size: Bytes that the broker buffers before it sends, at least 64; 0: its default; -1: no buffer.
        output_buffer_timeout_s: How long the broker buffers; 0: its default; -1: until the buffer is full.
        client_id: Shown in the broker's statistics; by default the first label of the host name.
        hostname: Shown in the broker's statistics; by default the host name.
        user_agent: Shown in the broker's statistics.
        topology_region, topology_zone: Where the program runs: a broker that knows its own region and zone prefers
            consumers there. Empty: unknown.
        tls_v1: Require TLS. If the broker does not offer it, connecting fails. The options below do not switch it on,
            because they are for https addresses of discovery services, too; without it, a warning is logged.
        tls_root_ca_file: PEM file of the trusted CAs; None: the system's CAs.
        tls_cert, tls_key: PEM files of the client's certificate, for brokers that require one. If the key is None, the
            certificate's file has it.
        tls_insecure_skip_verify: Skip certificate verification.
        tls_context: Used instead of the four options above; needs `tls_v1`.
        snappy, deflate: Compress the connection if the broker supports it; at most one of them.
        deflate_level: 1 is fastest, 9 is smallest; the broker may use a lower level for the data it sends.
        auth_secret: The token or secret for brokers that require authentication; empty: none.
        auth_secret_file: A file whose first line is the secret, instead of `auth_secret`. It is read for each
            connection, so a new secret is used without a restart.
        hooks: Called when something happens; see `Hooks`. None: no hooks, even if some are installed.

    Raises:
        TypeError: A value has another type.
        ValueError: A value is invalid, or a file cannot be used.
    """

    dial_timeout_s: float = 1.0
    heartbeat_interval_s: float = 30.0
    msg_timeout_s: float = 0.0
    sample_rate: int = 0
    output_buffer_size: int = 16 * KIB
    output_buffer_timeout_s: float = 0.25
    client_id: str = field(default_factory=_short_hostname)
    hostname: str = field(default_factory=socket.gethostname)
    user_agent: str = f"trio-nsq/{__version__}"
    topology_region: str = ""
    topology_zone: str = ""
    tls_v1: bool = False
    tls_root_ca_file: StrPath | None = None
    tls_cert: StrPath | None = None
    tls_key: StrPath | None = None
    tls_insecure_skip_verify: bool = False
    tls_context: ssl.SSLContext | None = None
    snappy: bool = False
    deflate: bool = False
    deflate_level: int = 6
    auth_secret: str = field(default="", repr=False)
    auth_secret_file: StrPath | None = None
    hooks: Hooks | None = field(default_factory=installed_hooks, repr=False)

    def __post_init__(self) -> None:
        check_options(self)
        heartbeat_s, timeout_s = self.heartbeat_interval_s, self.msg_timeout_s
        size, flush_s = self.output_buffer_size, self.output_buffer_timeout_s
        self._require("dial_timeout_s", self.dial_timeout_s > 0, "more than 0")
        self._require("heartbeat_interval_s", heartbeat_s == OFF or heartbeat_s >= 1, "-1 or at least 1")
        self._require("msg_timeout_s", timeout_s == 0 or timeout_s >= 1, "0 or at least 1")
        self._require("sample_rate", 0 <= self.sample_rate <= 99, "within 0..99")
        self._require("output_buffer_size", size in (OFF, 0) or size >= 64, "-1, 0 or at least 64")
        self._require("output_buffer_timeout_s", flush_s == OFF or flush_s >= 0, "-1, 0 or more")
        for name in ("heartbeat_interval_s", "msg_timeout_s", "output_buffer_timeout_s"):
            self._require(name, getattr(self, name) <= MAX_SECONDS, f"at most {MAX_SECONDS}")
        self._require("snappy", not (self.snappy and self.deflate), "False if deflate is True")
        self._require("deflate_level", 1 <= self.deflate_level <= 9, "within 1..9")
        self._require("tls_cert", self.tls_key is None or self.tls_cert is not None, "given if tls_key is")
        # Report unusable files here.
        self.secret.read()
        if self.tls_v1:
            self.client_context()

    def _require(self, name: str, holds: bool, wanted: str) -> None:
        if not holds:
            raise ValueError(f"{name} is {getattr(self, name)}; it must be {wanted}")

    def client_context(self) -> ssl.SSLContext:
        """Return the TLS context. Raises TLSFilesError."""
        if self.tls_context is not None:
            return self.tls_context
        return TLSFiles(
            self.tls_root_ca_file, self.tls_cert, self.tls_key, self.tls_insecure_skip_verify
        ).context()

    @property
    def secret(self) -> Secret:
        """The secret, which is sent to brokers and discovery services that require authentication."""
        return Secret(self.auth_secret, self.auth_secret_file)

    def https_context(self) -> ssl.SSLContext | None:
        """Return the TLS context for HTTP; None: no option is given, use the system's CAs. Raises TLSFilesError."""
        return self.client_context() if self.tls_context or self.has_tls_files else None

    @property
    def has_tls_files(self) -> bool:
        """Whether options say which certificates to use and to trust, other than `tls_context`."""
        return bool(self.tls_root_ca_file or self.tls_cert or self.tls_insecure_skip_verify)

    @property
    def may_have_certificate(self) -> bool:
        """Whether the client may have a certificate, by which a broker may know it without a secret."""
        return self.tls_v1 and (self.tls_cert is not None or self.tls_context is not None)

    @property
    def read_timeout_s(self) -> float:
        """How long the broker may send nothing before the connection counts as lost; infinite without heartbeats."""
        return float("inf") if self.heartbeat_interval_s == OFF else 2 * self.heartbeat_interval_s

    def identify(self) -> dict[str, object]:
        place = {"topology_region": self.topology_region, "topology_zone": self.topology_zone}
        return {
            **(place if any(place.values()) else {}),
            "client_id": self.client_id,
            "hostname": self.hostname,
            "user_agent": self.user_agent,
            "feature_negotiation": True,
            "heartbeat_interval": _in_ms(self.heartbeat_interval_s),
            "msg_timeout": _in_ms(self.msg_timeout_s),
            "sample_rate": self.sample_rate,
            "output_buffer_size": self.output_buffer_size,
            "output_buffer_timeout": _in_ms(self.output_buffer_timeout_s),
            "tls_v1": self.tls_v1,
            "snappy": self.snappy,
            "deflate": self.deflate,
            "deflate_level": self.deflate_level,
        }


def _in_ms(seconds: float) -> int:
    return OFF if seconds == OFF else in_milliseconds(seconds)


def accepted_options(
    owner: type[object], settings: type[ConnectionSettings], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the options under their present names. Warns of deprecated names.

    Raises TypeError, like Python, if a name is not a field of the settings.
    """
    known = [each.name for each in fields(settings)]
    given = renamed_options(known, options)
    for name in given:
        if name not in known:
            from difflib import get_close_matches  # imported here: only errors need it

            near = get_close_matches(name, [*known, *signature(owner).parameters], 1, cutoff=0.7)
            hint = f". Did you mean {near[0]!r}?" if near else ""
            takers = [
                f"{each}()"
                for each, method in getmembers(owner, isfunction)
                if each[0] != "_" and name in signature(method).parameters
            ]
            if takers:
                hint = f"; it is an argument of {', '.join(takers)}"
            raise TypeError(f"{owner.__name__}() got an unexpected keyword argument {name!r}{hint}")
    return given


def renamed_options(known: Iterable[str], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with times that were given in milliseconds, under their former names, in seconds.

    Warns of each. Raises TypeError if one is given twice, or its value is not a number.
    """
    given = dict(options)
    for old in IN_MILLISECONDS & options.keys():
        name = old.removesuffix("_ms") + "_s"
        if name not in known:
            continue
        if name in options:
            raise TypeError(f"{name} and {old} are both given")
        value = given.pop(old)
        if value not in (None, OFF):
            check_number(old, value)
            value = value / SECOND_MS
        given[name] = value
        warn_deprecated(f"{old} is deprecated: use {name}={value}, in seconds")
    return given
