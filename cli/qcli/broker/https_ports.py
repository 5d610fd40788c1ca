"""Finds the HTTPS addresses of brokers that discovery services list: these know the port of plain HTTP only."""

import http.client
from collections.abc import Sequence

from trio_nsq.api.https import https_address as address_of_answer

from .admin_client import CONNECT_TIMEOUT_S
from .at_once import at_once
from .connection_options import ConnectOptions

_MAX_ANSWER_BYTES = 4096


def addresses_with_https(addresses: Sequence[str]) -> dict[str, str]:
    """Return the address to use for each of these plain HTTP addresses.

    If the command has options for TLS, each broker is asked, without the secret. One that requires TLS answers with its
    port for HTTPS, as for NSQ's own tools.
    """
    same = {address: address for address in addresses}
    if not ConnectOptions.of_command().has_tls or not addresses:
        return same
    found = at_once(addresses, https_address)
    return same | {address: answer for address, answer in found.items() if isinstance(answer, str) and answer}


def https_address(address: str) -> str:
    """Return the HTTPS address of a broker that requires TLS; empty if it does not, or does not answer."""
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=CONNECT_TIMEOUT_S)
    try:
        connection.request("GET", "/ping")
        answer = connection.getresponse()
        body = answer.read(_MAX_ANSWER_BYTES)
    except (OSError, http.client.HTTPException):
        return ""
    finally:
        connection.close()
    return address_of_answer(address, answer.status, body)
