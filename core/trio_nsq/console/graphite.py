"""Charts by Graphite, from the figures that brokers send to statsd: nsqadmin's names and forms. Pure."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import urlencode, urlsplit

from ..fleet.snapshot import BrokerState
from ..fleet.stats import number, text
from ..protocol.address import format_address
from .options import ConsoleOptions

_KEYS = {
    # nsqd's name of a figure: its title, and whether it is a counter
    "depth": ("Depth", False),
    "in_flight_count": ("In flight", False),
    "deferred_count": ("Deferred", False),
    "requeue_count": ("Requeued", True),
    "timeout_count": ("Timed out", True),
    "message_count": ("Messages per second", True),
    "clients": ("Clients", False),
}
_OF_TOPIC = ("depth", "message_count")
_OF_NODE = (
    ("*_bytes", "Memory", False),
    ("gc_pause_*", "Garbage collection pauses", False),
    ("gc_runs", "Garbage collections", True),
    ("heap_objects", "Objects in memory", False),
)
_RED = ("depth", "deferred_count")
SPAN = "2h"
"""The time that charts show: nsqadmin's default."""
_SAME = {"bgcolor": "ff000000", "yMin": "0", "lineMode": "connected", "drawNullAsZero": "false"}
_SMALL = {
    "height": "90",
    "width": "300",
    "hideGrid": "true",
    "hideLegend": "true",
    "hideAxes": "true",
    "margin": "4",
}
_LARGE = {"height": "450", "width": "800"}


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart: the URLs of its small and of its large picture."""

    title: str
    small: str
    large: str


@dataclass(frozen=True, slots=True)
class Graphite:
    """The charts that a Graphite draws; without `options.graphite_url`, there are none."""

    options: ConsoleOptions

    @property
    def origin(self) -> str:
        """The origin from which pages load pictures; empty if there are none, or the console fetches them."""
        if self.options.proxy_graphite or not self.options.graphite_url:
            return ""
        parts = urlsplit(self.options.graphite_url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"

    def topic(self, topic: str, node: str = "*") -> list[Chart]:
        """Return the charts of a topic on a broker, or on all."""
        return self._charts(_OF_TOPIC, node, f"topic.{clean(topic)}")

    def channel(self, topic: str, channel: str, node: str = "*") -> list[Chart]:
        """Return the charts of a channel on a broker, or on all."""
        return self._charts(_KEYS, node, f"topic.{clean(topic)}.channel.{clean(channel)}")

    def broker(self, state: BrokerState) -> list[Chart]:
        """Return the charts of a broker's process."""
        host, port = text(state.info, "broadcast_address"), number(state.info, "http_port")
        return self.node(format_address(host, port) if host and port else state.address)

    def node(self, node: str) -> list[Chart]:
        """Return the charts of the process of the broker with this HTTP address."""
        found = []
        for key, title, is_counter in _OF_NODE if self.options.graphite_url else ():
            target = f"{self._prefix(node)}mem.{key}"
            if is_counter:
                target = f"movingAverage({target},45)"
            found.append(
                self._chart(title, self._formatted(target, is_counter), is_counter, "red,green,blue,purple")
            )
        return found

    def counter(self) -> list[Chart]:
        """Return the chart of all messages."""
        return self._charts(("message_count",), "*", "topic.*.channel.*", colour="green")

    def rate_url(self, target: str) -> str:
        """Return the URL that gives the last complete value of a figure."""
        interval_s = self.options.statsd_interval_ms // 1000
        query = {
            "from": f"-{2 * interval_s}sec",
            "until": f"-{interval_s}sec",
            "format": "json",
            "target": target,
        }
        return f"{self._url}/render?{urlencode(query)}"

    def render_url(self, query: str) -> str:
        """Return the URL of a picture, for a query that a page of the console has made."""
        return f"{self._url}/render?{query}"

    def rate(self, answer: object) -> str:
        """Return the rate in Graphite's answer to `rate_url`: per second, or `N/A`."""
        match answer:
            case [{"datapoints": [[int() | float() as value, *_], *_]}, *_] if value >= 0:
                return f"{value / max(1, self.options.statsd_interval_ms // 1000):.2f}"
        return "N/A"

    @property
    def _url(self) -> str:
        return self.options.graphite_url.rstrip("/")

    def _charts(self, keys: Iterable[str], node: str, of: str, colour: str = "") -> list[Chart]:
        if not self.options.graphite_url:
            return []
        return [
            self._chart(
                _KEYS[key][0],
                self._sum(key, node, of),
                _KEYS[key][1],
                colour or ("red" if key in _RED else "blue"),
            )
            for key in keys
        ]

    def _chart(self, title: str, target: str, is_counter: bool, colours: str) -> Chart:
        interval_s = max(1, self.options.statsd_interval_ms // 1000)
        if is_counter:
            target = f"scale({target},{1 / interval_s:.6g})"
        target = f'summarize({target},"{interval_s}sec","avg")'
        small = {**_SAME, **_SMALL, "fgcolor": "black"}
        large = {**_SAME, **_LARGE, "fgcolor": "999999"}
        return Chart(title, *(_picture(self._place, look, target, colours) for look in (small, large)))

    @property
    def _place(self) -> str:
        """Where viewers get pictures."""
        if self.options.proxy_graphite:
            return self.options.root.rstrip("/")
        parts = urlsplit(self._url)
        return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()

    def _sum(self, key: str, node: str, of: str) -> str:
        return f"sumSeries({self._formatted(f'{self._prefix(node)}{of}.{key}', _KEYS[key][1])})"

    def _prefix(self, node: str) -> str:
        prefix = self.options.statsd_prefix.replace("%s", re.sub(r"[.:]", "_", node))
        return prefix if prefix.endswith(".") else f"{prefix}."

    def _formatted(self, key: str, is_counter: bool) -> str:
        form = self.options.statsd_counter_format if is_counter else self.options.statsd_gauge_format
        return form.replace("%s", key) if form else key


def clean(name: str) -> str:
    """Return a name as statsd stores it."""
    return re.sub(r"[^a-zA-Z0-9_.-]", "", name.replace(" ", "_").replace("/", "-"))


def _picture(place: str, look: dict[str, str], target: str, colours: str) -> str:
    query: Sequence[tuple[str, str]] = [
        *look.items(),
        ("colorList", colours),
        ("from", f"-{SPAN}"),
        ("until", "-1min"),
        ("target", target),
    ]
    return f"{place}/render?{urlencode(query)}"
