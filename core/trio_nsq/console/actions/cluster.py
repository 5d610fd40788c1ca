"""Changes of topics and channels on all brokers and discovery services.

`rounds` is pure: it decides who gets which request, and in which order. `apply` makes the requests and keeps the
result of each.

A deleted topic comes back if a consumer finds a broker by an old registration. So discovery services first hide the
brokers, then the brokers delete the topic, and at last the services forget it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ...lookup.answers import ProducerAddress
from ...lookup.hosts import HostPatterns
from ...protocol.address import without_secrets
from ..console import Console
from ..upstream.client import Results, UpstreamError
from ..upstream.discovery import ask_lookup

Verb = Literal["create", "delete", "pause", "unpause", "empty"]


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a topic; with `channel`, of that channel."""

    verb: Verb
    topic: str
    channel: str = ""

    @property
    def kind(self) -> str:
        """`topic` or `channel`."""
        return "channel" if self.channel else "topic"

    @property
    def path(self) -> str:
        """The path of the request to brokers."""
        return f"/{self.kind}/{self.verb}"

    @property
    def params(self) -> dict[str, str]:
        """The query of the request to brokers."""
        return {"topic": self.topic, **({"channel": self.channel} if self.channel else {})}

    @property
    def name(self) -> str:
        """nsqadmin's name of the action, such as `pause_channel`."""
        return f"{self.verb}_{self.kind}"


@dataclass(frozen=True, slots=True)
class Step:
    """A request to one server.

    Attributes:
        server: The address.
        is_lookupd: Whether it is a discovery service.
        error: Why it failed; None: it succeeded, or was not made yet.
    """

    server: str
    path: str
    params: Mapping[str, str]
    is_lookupd: bool = False
    error: UpstreamError | None = None

    @property
    def name(self) -> str:
        """The address without secrets, for pages and logs."""
        return without_secrets(self.server)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a change did.

    Attributes:
        steps: All requests that changed something, or failed to.
        lookups: Why discovery services did not tell where the topic is.
    """

    steps: Sequence[Step] = ()
    lookups: Sequence[UpstreamError] = ()

    @property
    def done(self) -> list[Step]:
        """The steps that succeeded."""
        return [step for step in self.steps if step.error is None]

    @property
    def missing(self) -> list[Step]:
        """The steps on servers that do not have the topic or channel."""
        return [step for step in self.steps if step.error is not None and step.error.is_missing]

    @property
    def failed(self) -> list[Step]:
        """The steps that failed for another reason."""
        return [step for step in self.steps if step.error is not None and not step.error.is_missing]

    @property
    def brokers(self) -> list[str]:
        """The brokers that did it."""
        return [step.server for step in self.done if not step.is_lookupd]

    @property
    def results(self) -> Results[Step]:
        """The results of all servers, by address; a server with an error has failed."""
        errors = {step.name: step.error for step in self.steps if step.error is not None}
        return Results({step.name: step for step in self.done if step.name not in errors}, errors)


@dataclass(frozen=True, slots=True)
class Places:
    """Where a topic is.

    Attributes:
        lookupds: All discovery services.
        brokers: The brokers that have the topic, or may have it, by the addresses for requests.
        listed: The registered addresses of its brokers, by discovery service.
        may_create: Brokers that create the topic themselves: those that are given, if there is no discovery service.
        errors: Of discovery services that did not answer, or do not know the topic.
    """

    lookupds: Sequence[str] = ()
    brokers: Sequence[str] = ()
    listed: Mapping[str, Sequence[str]] = field(default_factory=dict)
    may_create: Sequence[str] = ()
    errors: Sequence[UpstreamError] = ()


async def find(console: Console, topic: str) -> Places:
    """Find the brokers of a topic.

    The discovery services are asked; brokers whose addresses were given, and those that had the topic at the last
    poll, may have it, too.
    """
    lookupds = console.watcher.lookupds
    answers = await ask_lookup(console.upstream, lookupds, topic)
    given = console.options.nsqd_http_addresses
    polled = console.watcher.snapshot.topics.get(topic)
    listed = usable(console, answers)
    known = aliases(console)
    addresses = [known.get(address, address) for found in listed.values() for address in found]
    brokers = dict.fromkeys([*given, *addresses, *(polled.parts if polled else ())])
    return Places(lookupds, list(brokers), listed, () if lookupds else given, list(answers.errors.values()))


def usable(console: Console, answers: Results[list[ProducerAddress]]) -> dict[str, list[str]]:
    """Return the HTTP addresses of allowed brokers, by discovery service."""
    allows = HostPatterns(console.options.lookupd_allowed_hosts).allow
    return {
        lookupd: [
            node.http_address
            for node in found
            if node.http_address and node.has_usable_host and allows(node.broadcast_address)
        ]
        for lookupd, found in answers.values.items()
    }


def aliases(console: Console) -> dict[str, str]:
    """Return the address for requests by registered address, for brokers that the last poll found at both."""
    return {
        node.http_address: address
        for address, broker in console.watcher.snapshot.brokers.items()
        for node in broker.registrations.values()
        if node.http_address
    }


def rounds(change: Change, places: Places) -> list[list[Step]]:
    """Return the requests: those of a round are made at once, and the next round begins when all have ended."""
    topic = {"topic": change.topic}

    def to_lookupds(path: str, params: Mapping[str, str]) -> list[Step]:
        return [Step(lookupd, path, params, is_lookupd=True) for lookupd in places.lookupds]

    def to_brokers(path: str, params: Mapping[str, str], brokers: Iterable[str]) -> list[Step]:
        return [Step(broker, path, params) for broker in brokers]

    on_brokers = to_brokers(change.path, change.params, places.brokers)
    if change.verb == "create":
        plan = [to_lookupds("/topic/create", topic) + to_brokers("/topic/create", topic, places.may_create)]
        if change.channel:
            plan.append(to_lookupds(change.path, change.params) + on_brokers)
        return plan
    if change.verb != "delete":
        return [on_brokers]
    hidden = [
        Step(lookupd, "/topic/tombstone", {**topic, "node": node}, is_lookupd=True)
        for lookupd, nodes in places.listed.items()
        for node in nodes
        if not change.channel
    ]
    return [hidden, on_brokers, to_lookupds(change.path, change.params)]


async def apply(console: Console, change: Change, *, token: str | None = None) -> Outcome:
    """Make a change on all servers, and return the result of each. Nothing is raised for a server that fails.

    Args:
        token: The viewer's token, so that the servers check its roles; None: the console's own.
    """
    places = await find(console, change.topic)
    is_new = change.verb == "create"
    errors = [error for error in places.errors if not (is_new and error.is_missing)]
    return await run(console, rounds(change, places), token=token, lookups=errors)


async def tombstone(
    console: Console, topic: str, node: str, broker: str = "", *, token: str | None = None
) -> Outcome:
    """Hide a broker from the consumers of a topic at all discovery services, and delete the topic there.

    Args:
        node: The broker's registered HTTP address.
        broker: The broker's address for requests; empty: hide it only.
    """
    params = {"topic": topic, "node": node}
    plan = [[Step(each, "/topic/tombstone", params, is_lookupd=True) for each in console.watcher.lookupds]]
    if broker:
        plan.append([Step(broker, "/topic/delete", {"topic": topic})])
    return await run(console, plan, token=token)


async def run(
    console: Console,
    plan: Iterable[Sequence[Step]],
    *,
    token: str | None = None,
    lookups: Sequence[UpstreamError] = (),
) -> Outcome:
    """Make requests, round by round; a failure does not stop the rest."""
    made: list[Step] = []
    for steps in plan:
        by_server: dict[str, list[Step]] = {}
        for step in steps:
            by_server.setdefault(step.server, []).append(step)

        async def act(server: str, by_server: Mapping[str, list[Step]] = by_server) -> list[Step]:
            return [await _made(console, step, token) for step in by_server[server]]

        answers = await console.upstream.on_all(by_server, act)
        made += [step for found in answers.values.values() for step in found]
    return Outcome(made, lookups)


async def _made(console: Console, step: Step, token: str | None) -> Step:
    try:
        await console.upstream.request("POST", step.server, step.path, step.params, token=token)
    except UpstreamError as exc:
        return Step(step.server, step.path, step.params, step.is_lookupd, exc)
    return step
