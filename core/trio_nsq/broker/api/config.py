"""`/config`: the options, by their names in a configuration file and encoded as in nsqd (NSQ's HTTP API: /config)."""

import logging
from dataclasses import fields
from pathlib import Path
from typing import Any

from ...access.auth_file import AuthFileError
from ...http.messages import HTTPError, Request, Response
from ...protocol.address import without_secrets
from ...protocol.untrusted_json import decode_json
from ...text.log_levels import level_number, parse_level
from ..addresses import BoundAddresses, Broadcast
from ..errors import StartupError
from ..server import Server

_LOGGER = logging.getLogger("trio_nsq")
_TLS_REQUIRED = {"false": 0, "tcp-https": 1, "true": 2}
_TLS_VERSIONS = {"tls1.0": 0x301, "tls1.1": 0x302, "tls1.2": 0x303, "tls1.3": 0x304}
_NS_PER_MS = 1_000_000
_NO_FLAGS = ("limits", "topic_defaults", "node_id", "heartbeat_interval", "output_buffer_size")
"""Fields of `BrokerOptions` and `Limits` that are not options, or are options under another name."""

_OF_TOPICS = ("retention_time", "retention_bytes")
"""Options that are defaults for settings of topics."""


class Config:
    """The handlers of `/config`. `bound` has the broker's addresses."""

    def __init__(self, server: Server, bound: BoundAddresses) -> None:
        self._server = server
        self._broadcast = Broadcast.of(server.options, bound)

    async def get(self, request: Request) -> Response:
        """Return the value of an option."""
        return self._value(_option(request))

    async def put(self, request: Request) -> Response:
        """Change `log_level`, `nsqlookupd_tcp_addresses` or `draining`, or read `auth_file` again.

        Returns the new value.
        """
        lookup = self._server.topics.lookup
        assert lookup is not None  # it is set before clients are served
        option = _option(request)
        if not request.body:
            raise HTTPError(413, "INVALID_VALUE")
        if option == "log_level":
            try:
                _LOGGER.setLevel(parse_level(request.body))
            except ValueError as exc:
                raise HTTPError(400, "INVALID_VALUE") from exc
        elif option == "nsqlookupd_tcp_addresses":
            try:
                lookup.set_addresses(_parse_addresses(request.body))
            except ValueError as exc:
                raise HTTPError(400, "INVALID_VALUE") from exc
        elif option == "draining":
            await self._server.drain_mode.set(_parse_flag(request.body))
        elif option == "auth_file" and self._server.options.auth_file is not None:
            await self._reload_auth_file(request.body.decode("utf-8", "replace"))
        elif option in _OF_TOPICS:
            raise HTTPError(
                400,
                f"INVALID_OPTION: {option} cannot be changed while the broker runs. Change it for a topic with PUT "
                f"/topic/settings, or restart the broker with another --{option.replace('_', '-')}",
            )
        else:
            raise HTTPError(400, "INVALID_OPTION")
        return self._value(option)

    async def _reload_auth_file(self, path: str) -> None:
        # Another path would allow an administrator of the broker to read the machine's files.
        if path != str(self._server.options.auth_file):
            raise HTTPError(400, "INVALID_VALUE: the body must be the path that --auth-file gives")
        try:
            await self._server.authentication.reload(self._server)
        except (AuthFileError, StartupError) as exc:
            raise HTTPError(400, f"INVALID_VALUE: {exc}; the previous contents stay in use") from exc

    def _value(self, option: str) -> Response:
        options = self._options()
        if option not in options:
            raise HTTPError(400, "INVALID_OPTION")
        return _encode(options[option])

    def _options(self) -> dict[str, Any]:
        """Return all options as Python values; times in nanoseconds."""
        options: dict[str, Any] = {}
        for part in (self._server.options, self._server.options.limits):
            for field in fields(part):
                value = getattr(part, field.name)
                if field.name.endswith("_ms"):
                    value *= _NS_PER_MS
                options[field.name.removesuffix("_ms")] = value
        for name in _NO_FLAGS:
            del options[name]
        defaults = self._server.options.topic_defaults
        lookup = self._server.topics.lookup
        assert lookup is not None  # it is set before clients are served
        return options | {
            "id": self._server.node_id,
            "draining": self._server.broker.draining,
            "retention_time": defaults.retention_time_ms * _NS_PER_MS,
            "retention_bytes": defaults.retention_bytes,
            "expire_idle": defaults.expire_idle_ms * _NS_PER_MS,
            "log_level": level_number(_LOGGER),
            "log_prefix": _log_prefix(),
            "broadcast_address": self._broadcast.address,
            "broadcast_tcp_port": self._broadcast.tcp_port,
            "broadcast_http_port": self._broadcast.http_port,
            "auth_http_addresses": tuple(map(without_secrets, options["auth_http_addresses"])),
            "nsqlookupd_tcp_addresses": lookup.addresses,
            "statsd_prefix": self._broadcast.statsd_prefix(options["statsd_prefix"]),
            "tls_required": _TLS_REQUIRED[self._server.options.required_tls],
            "tls_min_version": _TLS_VERSIONS[options["tls_min_version"]],
            # nsqd's defaults. This broker has no queue scan.
            "queue_scan_worker_pool_max": 4,
            "queue_scan_selection_count": 20,
        }


def _option(request: Request) -> str:
    return request.path.rpartition("/")[2]


def _encode(value: Any) -> Response:
    """Encode text as it is and other values as JSON. An empty value gives an empty response without content type."""
    if value is None or value == "":
        return Response.empty()
    if isinstance(value, str | Path):
        return Response.text(str(value))
    if isinstance(value, tuple):
        # Go writes 1.0 as 1.
        value = [int(item) if item in (0.0, 1.0) else item for item in value]
    return Response.json(value)


def _log_prefix() -> str:
    """Return the prefix of log lines, if the formatter has one."""
    prefixes = [getattr(handler.formatter, "prefix", "") for handler in _LOGGER.handlers]
    return next(filter(None, prefixes), "")


def _parse_flag(body: bytes) -> bool:
    if body not in (b"true", b"false"):
        raise HTTPError(400, "INVALID_VALUE: the body must be true or false")
    return body == b"true"


def _parse_addresses(body: bytes) -> tuple[str, ...]:
    """Parse a JSON array of strings; `null` is an empty array. Raises ValueError."""
    addresses = decode_json(body)
    if addresses is None:
        return ()
    if not isinstance(addresses, list) or not all(isinstance(address, str) for address in addresses):
        raise ValueError("not an array of strings")
    return tuple(addresses)
