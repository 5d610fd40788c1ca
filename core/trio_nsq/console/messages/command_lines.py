"""Command lines that do the same as a page, for copying into a shell. Names and bodies in them are untrusted."""

import shlex
from base64 import b64encode
from collections.abc import Mapping
from urllib.parse import urlencode

from ...protocol.address import is_unix_path

MAX_BODY = 2000
"""Longer bodies are read from a file."""


def read_with_curl(address: str, topic: str, first: int, end: int) -> str:
    """Return the command that reads messages as JSON lines."""
    query = urlencode({"topic": topic, "from": first, "until": end})
    return f"curl -fsS {_url(address, f'/topic/read?{query}')}"


def read_with_qcli(address: str, topic: str, first: int, end: int) -> str:
    """Return the command that reads messages as JSON lines."""
    options = f"--nsqd-http-address {shlex.quote(address)} --from {first} -n {end - first} --format json"
    return f"qcli peek {options} {_argument(topic)}"


def peek_with_curl(address: str, topic: str, channel: str, count: int) -> str:
    """Return the command that shows the next messages of a channel."""
    query = urlencode({"topic": topic, "channel": channel, "max_messages": count})
    return f"curl -fsS {_url(address, f'/channel/peek?{query}')}"


def peek_with_qcli(address: str, topic: str, channel: str, count: int) -> str:
    """Return the command that shows the next messages of a channel."""
    options = f"--nsqd-http-address {shlex.quote(address)} -n {count}"
    return f"qcli peek {options} {_argument(f'{topic}/{channel}')}"


def publish_with_curl(
    address: str, topic: str, body: bytes, size: int, headers: Mapping[str, str] | None = None
) -> str:
    """Return the command that publishes a body.

    Args:
        body: The body, or its beginning.
        size: The size of the whole body.
        headers: Those of the message. A value that terminals do not show as it is is left out.
    """
    url = _url(address, f"/pub?{urlencode({'topic': topic})}")
    for name, value in (headers or {}).items():
        if value.isprintable():
            url = f"-H {shlex.quote(f'X-NSQ-Header-{name}: {value}' if value else f'X-NSQ-Header-{name};')} {url}"
    if len(body) < size or size > MAX_BODY:
        return f"curl -fsS --data-binary @body.bin {url}"
    text = _safe_text(body)
    if text is not None and not text.startswith("@"):
        return f"curl -fsS --data-binary {shlex.quote(text)} {url}"
    encoded = b64encode(body).decode()
    return f"printf %s {shlex.quote(encoded)} | base64 -d | curl -fsS --data-binary @- {url}"


def publish_with_qcli(address: str, tcp_address: str, topic: str, sequence: int) -> str:
    """Return the command that reads a message, and publishes it again to the same broker.

    Args:
        tcp_address: The broker's TCP address; empty: unknown.
    """
    reading = read_with_qcli(address, topic, sequence, sequence + 1)
    where = f"--nsqd-tcp-address {shlex.quote(tcp_address)} " if tcp_address else ""
    return f"{reading} | qcli pub --format json {where}{_argument(topic)}"


def _safe_text(body: bytes) -> str | None:
    """Return a body as text if a terminal shows it as it is: pasted control characters could act on a shell."""
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return None
    return text if text.isprintable() else None


def _url(address: str, rest: str) -> str:
    if is_unix_path(address):
        return f"--unix-socket {shlex.quote(address)} {shlex.quote(f'http://localhost{rest}')}"
    base = address if "://" in address else f"http://{address}"
    return shlex.quote(base.rstrip("/") + rest)


def _argument(name: str) -> str:
    """Quote a name; one that begins with a hyphen would be an option."""
    return f"-- {shlex.quote(name)}" if name.startswith("-") else shlex.quote(name)
