"""A console before a mixed fleet, for tests of what changes something: forms are sent as a browser sends them.

`Site` asks for pages and sends forms; `acting_site` runs a fleet of two brokers of ours, one nsqd and two discovery
services, and a console before it.
"""

import html
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from urllib.parse import quote, urlencode, urlsplit

from console.support import Answer, WebServer, qcli_admin
from fleet.support import Fleet, running_fleet, wait_until
from interop.peers import Broker

_FORM = re.compile(r"<form(?P<attributes>[^>]*)>(?P<inside>.*?)</form>", re.DOTALL)
_FIELD = re.compile(r"<(input|select|button|textarea)\b([^>]*)>")
_ATTRIBUTE = re.compile(r'([\w-]+)="([^"]*)"')


@dataclass(frozen=True)
class Page:
    """A page.

    Attributes:
        path: Where it was found, after redirections.
        text: Its text without elements, and with single blanks.
    """

    status: int
    path: str
    html: str

    @property
    def text(self) -> str:
        main = self.html.partition("<main")[2].partition("</main>")[0]
        return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", f"<main{main}")).split())

    @property
    def command(self) -> str:
        """The command line that the page shows."""
        found = re.search(r'<div class="command"><code>(.*?)</code>', self.html, re.DOTALL)
        assert found is not None, self.text
        return html.unescape(found[1])

    def form(self, containing: str = "") -> tuple[str, dict[str, str]]:
        """Return the action and the hidden fields of the form that sends something, and contains a text."""
        for found in _FORM.finditer(self.html):
            attributes = dict(_ATTRIBUTE.findall(found["attributes"]))
            if attributes.get("method") == "post" and containing in found["inside"]:
                fields: dict[str, str] = {}
                for _, text in _FIELD.findall(found["inside"]):
                    field = {name: html.unescape(value) for name, value in _ATTRIBUTE.findall(text)}
                    if field.get("type") == "hidden":
                        fields[field["name"]] = field["value"]
                return html.unescape(attributes.get("action", "")), fields
        raise AssertionError(f"no such form in {self.html}")


@dataclass(frozen=True)
class Site:
    """A console before a fleet, with the cookies that it has set."""

    fleet: Fleet
    server: WebServer
    cookies: dict[str, str] = field(default_factory=dict)

    def get(self, path: str) -> Page:
        """Ask for a page."""
        return self._page(self._ask("GET", path), path)

    def post(self, path: str, fields: Mapping[str, str] | Sequence[tuple[str, str]]) -> Page:
        """Send a form, with the token of any form if it has none, and follow a redirection to the page after it."""
        pairs = list(fields.items()) if isinstance(fields, Mapping) else list(fields)
        if not any(name == "csrf" for name, _ in pairs):
            pairs.append(("csrf", self.get("/create").form()[1]["csrf"]))
        headers = {
            "Content-Type": "application/x-www-form-urlencoded",
            "Origin": f"http://{self.server.address}",
        }
        return self._page(self._ask("POST", path, urlencode(pairs).encode(), headers), path)

    def send(self, page: Page, containing: str = "", **fields: str) -> Page:
        """Send the form of a page with its hidden fields, and these."""
        action, hidden = page.form(containing)
        return self.post(action, {**hidden, **fields})

    def _page(self, answer: Answer, path: str) -> Page:
        if answer.status == 303:
            location = urlsplit(answer.headers["location"])
            return self.get(location.path + (f"?{location.query}" if location.query else ""))
        return Page(answer.status, path, answer.body.decode())

    def _ask(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        sent = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        answer = self.server.ask(
            method, path, body, {**(headers or {}), **({"Cookie": sent} if sent else {})}
        )
        name, _, value = answer.headers.get("set-cookie", "").partition(";")[0].partition("=")
        if name:
            self.cookies[name] = value
        return answer

    def await_known(self, topic: str, channel: str, *brokers: Broker) -> None:
        """Wait until the console's last poll found a channel on these brokers."""
        # This page names the brokers that had the channel at the last poll, and no others.
        path = f"/topics/{quote(topic, safe='')}/{quote(channel, safe='')}/settings"
        for broker in brokers:
            wait_until(partial(self._shows, path, broker.http_address), f"{topic} on {broker.http_address}")

    def _shows(self, path: str, text: str) -> bool:
        page = self.get(path)
        return page.status == 200 and text in page.text


@contextmanager
def acting_site(folder: Path, *flags: str) -> Iterator[Site]:
    """Run a mixed fleet and a console before it until the block exits.

    Args:
        folder: Gets the data of the brokers.
        flags: Further flags of the console.
    """
    with running_fleet(folder, ours=2) as fleet:
        names = [f"--nsqd-http-address={address}" for address in fleet.http_addresses]
        names += [f"--lookupd-http-address={address}" for address in fleet.lookupd_addresses]
        with qcli_admin(
            folder / "console", *names, "--poll-interval=100ms", "--http-client-request-timeout=3s", *flags
        ) as server:
            yield Site(fleet, server)
