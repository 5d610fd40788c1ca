"""Changes of topics and channels on all brokers and discovery services: makes the requests of `fleet.changes`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...api import broker as api
from ...api import lookupd
from ...api.lookupd import ProducerAddress
from ...fleet.changes import Change, Places, Step, by_server, rounds
from ...lookup.hosts import host_filter
from ..console import Console
from ..upstream.client import Results, Upstream, UpstreamError
from ..upstream.discovery import ask_lookup


@dataclass(frozen=True, slots=True)
class StepResult(Step):
    """A request that was made; `error` says why it failed, None: it succeeded."""

    error: UpstreamError | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a change did.

    Attributes:
        steps: All requests that changed something, or failed to.
        lookups: Why discovery services did not tell where the topic is.
    """

    steps: Sequence[StepResult] = ()
    lookups: Sequence[UpstreamError] = ()

    @property
    def done(self) -> list[StepResult]:
        return [step for step in self.steps if step.error is None]

    @property
    def missing(self) -> list[StepResult]:
        """The steps on servers that do not have the topic or channel."""
        return [step for step in self.steps if step.error is not None and step.error.is_missing]

    @property
    def failed(self) -> list[StepResult]:
        """The steps that failed for another reason."""
        return [step for step in self.steps if step.error is not None and not step.error.is_missing]

    @property
    def brokers(self) -> list[str]:
        return [step.server for step in self.done if not step.is_lookupd]

    @property
    def results(self) -> Results[StepResult]:
        """The results of all servers, by address; a server with an error has failed."""
        errors = {step.name: step.error for step in self.steps if step.error is not None}
        return Results({step.name: step for step in self.done if step.name not in errors}, errors)


async def find(console: Console, topic: str) -> tuple[Places, list[UpstreamError]]:
    """Find the brokers of a topic. Also returns the errors of services that do not answer, or do not know the topic.

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
    places = Places(lookupds, list(brokers), listed, () if lookupds else given)
    return places, list(answers.errors.values())


def usable(console: Console, answers: Results[list[ProducerAddress]]) -> dict[str, list[str]]:
    allows = host_filter(console.options.lookupd_allowed_hosts)
    return {
        address: [
            node.http_address
            for node in found
            if node.http_address and node.has_usable_host and allows(node.broadcast_address)
        ]
        for address, found in answers.values.items()
    }


def aliases(console: Console) -> dict[str, str]:
    """Return the address for requests by registered address, for brokers that the last poll found at both."""
    return {
        node.http_address: address
        for address, broker in console.watcher.snapshot.brokers.items()
        for node in broker.registrations.values()
        if node.http_address
    }


async def apply(console: Console, change: Change, *, token: str | None = None) -> Outcome:
    """Make a change on all servers, and return the result of each. Nothing is raised for a server that fails.

    Args:
        token: The viewer's token, so that the servers check its roles; None: the console's own.
    """
    places, errors = await find(console, change.topic)
    is_new = change.verb == "create"
    errors = [error for error in errors if not (is_new and error.is_missing)]
    return await run(console.upstream.with_token(token), rounds(change, places), lookups=errors)


async def tombstone(
    console: Console, topic: str, node: str, broker: str = "", *, token: str | None = None
) -> Outcome:
    """Hide a broker from the consumers of a topic at all discovery services, and delete the topic there.

    Args:
        node: The broker's registered HTTP address.
        broker: The broker's address for requests; empty: hide it only.
    """
    hide = lookupd.tombstone(topic, node)
    plan = [[Step(each, hide, is_lookupd=True) for each in console.watcher.lookupds]]
    if broker:
        plan.append([Step(broker, api.act("delete", topic))])
    return await run(console.upstream.with_token(token), plan)


async def run(
    upstream: Upstream,
    plan: Iterable[Sequence[Step]],
    *,
    lookups: Sequence[UpstreamError] = (),
) -> Outcome:
    """Make requests, round by round; a failure does not stop the rest."""
    made: list[StepResult] = []
    for steps in plan:
        servers = by_server(steps)

        async def act(server: str, servers: Mapping[str, list[Step]] = servers) -> list[StepResult]:
            return [await _perform_step(upstream, step) for step in servers[server]]

        answers = await upstream.on_all(servers, act)
        made += [step for found in answers.values.values() for step in found]
    return Outcome(made, lookups)


async def _perform_step(upstream: Upstream, step: Step) -> StepResult:
    error = None
    try:
        await upstream.ask(step.server, step.request)
    except UpstreamError as exc:
        error = exc
    return StepResult(step.server, step.request, step.is_lookupd, error)
