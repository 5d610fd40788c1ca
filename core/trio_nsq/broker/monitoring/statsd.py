"""Sends metrics to a statsd server, under nsqd's names.

`figures`, `lines` and `packets` are pure; `StatsdClient` does the IO.
"""

import logging
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import trio

from ...protocol import is_ephemeral
from ...protocol.address import parse_address
from ..errors import StartupError
from ..server import Server
from .stats import broker_stats

logger: logging.Logger = logging.getLogger("trio_nsq.broker")

Kind = Literal["c", "g"]
"""Counter or gauge."""
Figures = dict[str, tuple[int, Kind]]
"""Values by name. Counters count from the start of the broker."""

_PAUSE_S = 1.0
"""As nsqd: nothing is sent in this time at the end of an interval."""

_TOPIC: dict[str, Kind] = {"message_count": "c", "message_bytes": "c", "depth": "g", "backend_depth": "g"}
_CHANNEL: dict[str, Kind] = {
    "message_count": "c",
    "depth": "g",
    "backend_depth": "g",
    "in_flight_count": "g",
    "deferred_count": "g",
    "requeue_count": "c",
    "timeout_count": "c",
}


# ---------------------------------------------------------------------- encoding


def figures(stats: Mapping[str, Any], *, exclude_ephemeral: bool = False) -> Figures:
    """Extract the metrics of a `/stats` document, in nsqd's order, without unavailable topics.

    Without `memory` there are no `mem.` metrics. `exclude_ephemeral` leaves out ephemeral topics and channels.
    """
    found: Figures = {}
    for topic in stats["topics"] or ():
        if "unavailable" in topic or (exclude_ephemeral and is_ephemeral(topic["topic_name"])):
            continue
        name = f"topic.{topic['topic_name']}."
        found |= {name + key: (topic[key], kind) for key, kind in _TOPIC.items()}
        found |= _latency(name, topic)
        for channel in topic["channels"]:
            if exclude_ephemeral and is_ephemeral(channel["channel_name"]):
                continue
            of_channel = f"{name}channel.{channel['channel_name']}."
            found |= {of_channel + key: (channel[key], kind) for key, kind in _CHANNEL.items()}
            found[f"{of_channel}clients"] = (channel["client_count"], "g")
            found |= _latency(of_channel, channel)
    memory = dict(stats.get("memory", {}))
    runs = memory.pop("gc_total_runs", None)
    found |= {f"mem.{key}": (value, "g") for key, value in memory.items()}
    if runs is not None:
        found["mem.gc_runs"] = (runs, "c")
    return found


def _latency(name: str, measured: Mapping[str, Any]) -> Figures:
    percentiles = measured["e2e_processing_latency"]["percentiles"] or ()
    return {
        f"{name}e2e_processing_latency_{percent(each['quantile'])}": (each["value"], "g")
        for each in percentiles
    }


def percent(quantile: float) -> str:
    """Format a quantile for a name: 0.5 is `50`, 0.995 is `99_5`. nsqd writes `100` for 0.995, as for 1.0."""
    return f"{quantile * 100:.10g}".replace(".", "_")


def lines(prefix: str, now: Figures, before: Mapping[str, tuple[int, Kind]]) -> Iterator[bytes]:
    """Yield the lines to send: gauges by value, counters by increase.

    If a counter is lower than before, its topic or channel was deleted and created again. Then the increase is its
    whole value.
    """
    for name, (value, kind) in now.items():
        if kind == "c":
            last, _ = before.get(name, (0, kind))
            value -= last if last <= value else 0
        yield f"{prefix}{name}:{value}|{kind}\n".encode()


def packets(of_lines: Iterable[bytes], max_bytes: int) -> Iterator[bytes]:
    """Join whole lines into datagrams of up to `max_bytes`. A longer line is a datagram of its own."""
    packet = b""
    for line in of_lines:
        if packet and len(packet) + len(line) > max_bytes:
            yield packet
            packet = b""
        packet += line
    if packet:
        yield packet


# ---------------------------------------------------------------------- sending


class StatsdClient:
    """Sends a broker's metrics, with `prefix` before each name. Raises StartupError: the address is invalid."""

    def __init__(self, server: Server, prefix: str) -> None:
        self._server = server
        self._options = server.options
        self._prefix = prefix
        self._before: Figures = {}
        self._error = ""
        try:
            self._host, self._port = parse_address(self._options.statsd_address)
        except ValueError as exc:
            raise StartupError(f"--statsd-address: {exc}") from exc

    async def push_on_schedule(self) -> None:
        """Send the metrics at the end of every interval; runs until cancelled."""
        interval_s = self._options.statsd_interval_ms / 1000
        due_s = trio.current_time()
        while True:
            due_s = max(due_s + interval_s, trio.current_time())
            await trio.sleep_until(due_s)
            try:
                await self._push(max(0.0, interval_s - _PAUSE_S))
            except OSError as exc:
                self._record_error(
                    f"statsd: cannot send to {self._options.statsd_address}: {exc.strerror or exc}"
                )
            else:
                self._record_error("")

    async def _push(self, duration_s: float) -> None:
        """Send all metrics, spread over this time. Raises OSError."""
        found = await trio.socket.getaddrinfo(self._host, self._port, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = found[0]
        stats = await broker_stats(
            self._server, time.time_ns(), include_clients=False, include_mem=self._options.statsd_mem_stats
        )
        now = figures(stats, exclude_ephemeral=self._options.statsd_exclude_ephemeral)
        to_send = list(packets(lines(self._prefix, now, self._before), self._options.statsd_udp_packet_size))
        self._before = now
        with trio.socket.socket(family, kind, protocol) as udp:
            for number, packet in enumerate(to_send):
                if number:
                    await trio.sleep(duration_s / len(to_send))
                await udp.sendto(packet, address)

    def _record_error(self, error: str) -> None:
        """Log an error, unless it is the same as last time; empty for success."""
        if error and error != self._error:
            logger.error("%s", error)
        self._error = error
