"""`/config`: nsqadmin's options, by their names in its configuration file."""

import ipaddress
import json
import logging
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ...protocol.address import parse_address, without_secrets
from ...protocol.limits import MIB
from ...protocol.untrusted_json import decode_json
from ...text.log_levels import level_number, parse_level
from ..access.proxies import is_within
from ..access.request_head import RequestHead
from ..access.viewer import require
from ..console import Console, console_of
from .answers import JSON, APIError, body_of, value

_LOGGER = logging.getLogger("trio_nsq")
_MAX_LOOKUPDS = 100
_NS_PER_MS = 1_000_000
_HTTP_PORT = 80


async def show(request: Request) -> Response:
    _check(request)
    return _encoded(console_of(request), request.path_params["opt"])


async def change(request: Request) -> Response:
    """Change an option, until the console stops: `nsqlookupd_http_addresses` or `log_level`."""
    _check(request)
    option = request.path_params["opt"]
    try:
        body = await body_of(request, MIB)
    except APIError:
        body = b""
    if not body:
        raise APIError(413, "INVALID_VALUE")
    try:
        if option == "log_level":
            _LOGGER.setLevel(parse_level(body))
        elif option == "nsqlookupd_http_addresses":
            console_of(request).watcher.lookupds = _addresses(body)
        else:
            raise APIError(400, "INVALID_OPTION")
    except ValueError as exc:
        raise APIError(400, "INVALID_VALUE") from exc
    return _encoded(console_of(request), option)


def _check(request: Request) -> None:
    """Check that the client is in the network, and has the role. Raises APIError, Forbidden."""
    network = console_of(request).options.allow_config_from_cidr
    incoming: RequestHead = request.state.incoming
    # Behind a proxy on this machine, every client would else be inside the default network.
    host = console_of(request).access.proxies.client(incoming.host, incoming.headers)
    if not network or not is_within(host, [ipaddress.ip_network(network, strict=False)]):
        raise APIError(403, "FORBIDDEN: /config is open to --allow-config-from-cidr only")
    require(request, "admin")


def _addresses(body: bytes) -> tuple[str, ...]:
    """Parse a JSON array of addresses. Raises ValueError."""
    found = decode_json(body)
    if found is None:
        return ()
    if not isinstance(found, list) or len(found) > _MAX_LOOKUPDS:
        raise ValueError("not an array of addresses")
    for address in found:
        if not isinstance(address, str):
            raise ValueError("not an address")
        parse_address(address.removeprefix("https://").removeprefix("http://"), _HTTP_PORT)
    return tuple(found)


def _encoded(console: Console, option: str) -> Response:
    found = _options(console)
    if option not in found:
        raise APIError(400, "INVALID_OPTION")
    content = found[option]
    if isinstance(content, str):
        return value(content.encode(), "text/plain; charset=utf-8")
    return value(json.dumps(content, separators=(",", ":")).encode(), JSON)


def _options(console: Console) -> Mapping[str, Any]:
    """Return the options under nsqadmin's names; times in nanoseconds."""
    options = console.options
    tls = options.tls
    return {
        "log_level": level_number(_LOGGER),
        "http_address": options.http_address,
        "base_path": options.base_path,
        "graphite_url": without_secrets(options.graphite_url),
        "proxy_graphite": options.proxy_graphite,
        "statsd_prefix": options.statsd_prefix,
        "statsd_counter_format": options.statsd_counter_format,
        "statsd_gauge_format": options.statsd_gauge_format,
        "statsd_interval": options.statsd_interval_ms * _NS_PER_MS,
        "nsqlookupd_http_addresses": [*map(without_secrets, console.watcher.lookupds)],
        "nsqd_http_addresses": [*map(without_secrets, options.nsqd_http_addresses)],
        "http_client_connect_timeout": options.connect_timeout_ms * _NS_PER_MS,
        "http_client_request_timeout": options.request_timeout_ms * _NS_PER_MS,
        "http_client_tls_insecure_skip_verify": tls.skip_verify,
        "http_client_tls_root_ca_file": str(tls.root_ca_file or ""),
        "http_client_tls_cert": str(tls.cert or ""),
        "http_client_tls_key": str(tls.key or ""),
        "allow_config_from_cidr": options.allow_config_from_cidr,
        "notification_http_endpoint": without_secrets(options.notification_http_endpoint),
        "acl_http_header": options.acl_http_header,
        "admin_users": [*options.admin_users],
    }
