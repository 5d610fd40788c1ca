"""Definitions of a fleet: reads, plans and makes what a document says, with the code of `qcli definitions`."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import trio

from ...api import broker as api
from ...fleet.definitions.changes import DefinitionChange, changes_to, effects_of
from ...fleet.definitions.model import DefinitionsError, Topics, of_broker, of_stats
from ...fleet.definitions.progress import AT_ONCE, Progress
from ...text.wording import count_of
from ..upstream.client import Results, Upstream, UpstreamError
from .report import Report

APPLY_S = 60.0
"""One request of a viewer makes changes for this long; then the viewer applies the file again."""
_IS_NSQD = "it is an nsqd, which has no settings"
_MAX_FAILURES = 3
"""Named for each broker."""
Plan = list[DefinitionChange]


async def read(upstream: Upstream, addresses: Sequence[str]) -> Results[Topics]:
    """Return what each broker has; an nsqd has no settings."""

    async def ask(address: str) -> Topics:
        return (await _read(upstream, address))[0]

    return await upstream.on_all(addresses, ask)


async def plan(
    upstream: Upstream, addresses: Sequence[str], wanted: Topics, *, delete: bool
) -> Results[Plan]:
    """Return the changes that make each broker as it is wanted, with the messages that they delete or drop.

    Args:
        delete: Also delete topics and channels that are not wanted.
    """

    async def one(address: str) -> Plan:
        found, has_settings = await _read(upstream, address)
        compare = partial(changes_to, wanted, found, delete=delete)
        try:
            changes = await trio.to_thread.run_sync(compare)
        except DefinitionsError as exc:
            raise UpstreamError(address, " ".join(exc.problems)) from exc
        if not has_settings and any(each.verb == "set" for each in changes):
            raise UpstreamError(address, _IS_NSQD)
        return await upstream.perform(address, effects_of(changes, found))

    return await upstream.on_all(addresses, one)


def fingerprint(plans: Mapping[str, Plan]) -> str:
    """Return a text that is equal for equal changes, whatever messages they delete."""
    changes = [
        [address, each.verb, each.topic, each.channel, dict(each.settings), dict(each.before)]
        for address, plan_ in sorted(plans.items())
        for each in plan_
    ]
    return hashlib.sha256(json.dumps(changes, sort_keys=True).encode()).hexdigest()[:32]


@dataclass(slots=True)
class _Outcome:
    """What one broker did, and why it did not do the rest."""

    progress: Progress
    failures: list[str] = field(default_factory=list)


async def apply(
    upstream: Upstream, plans: Mapping[str, Plan], *, limit_s: float = APPLY_S
) -> tuple[Report, int]:
    """Make the changes of all brokers; return what each did, and how many changes were made.

    Args:
        limit_s: No request begins after this time.
    """
    deadline_s = trio.current_time() + limit_s
    outcomes = {address: _Outcome(Progress(changes)) for address, changes in plans.items() if changes}
    async with trio.open_nursery() as nursery:
        for address, outcome in outcomes.items():
            nursery.start_soon(_make, upstream, address, outcome, deadline_s)
    done: dict[str, str] = {}
    failed: dict[str, str] = {}
    for address, outcome in outcomes.items():
        made = len(outcome.progress.done)
        text = f"{count_of(made, 'change')} made"
        if outcome.failures:
            more = len(outcome.failures) - _MAX_FAILURES
            why = "; ".join(outcome.failures[:_MAX_FAILURES]) + (f"; and {more} more" if more > 0 else "")
            failed[address] = f"{text}, then: {why}" if made else why
        else:
            done[address] = text
    return Report(done, failed), sum(len(each.progress.done) for each in outcomes.values())


async def _make(upstream: Upstream, address: str, outcome: _Outcome, deadline_s: float) -> None:
    progress = outcome.progress
    slots = trio.CapacityLimiter(AT_ONCE)
    is_late = False

    async def make(place: int) -> None:
        nonlocal is_late
        async with slots:
            if is_late or progress.is_lost:
                return
            if trio.current_time() > deadline_s:
                is_late = True
                outcome.failures.append("the time for one request is over: apply the file again")
                return
            change = progress.plan[place]
            try:
                await upstream.ask(address, change.request())
            except UpstreamError as exc:
                if progress.note_failure(place, no_answer=not exc.status):
                    outcome.failures.append(f"{change.name}: {exc.reason}")
            else:
                progress.done.add(place)

    for places in progress.rounds():
        async with trio.open_nursery() as nursery:
            for place in places:
                nursery.start_soon(make, place)
        if is_late:
            return


async def _read(upstream: Upstream, address: str) -> tuple[Topics, bool]:
    """Return what a broker has, and whether it has settings. Raises UpstreamError."""
    try:
        answer = await upstream.ask(address, api.definitions())
    except UpstreamError as exc:
        if exc.status != 404:
            raise
        return of_stats(await upstream.ask(address, api.stats())), False
    try:
        return of_broker(answer), True
    except ValueError as exc:
        raise UpstreamError(address, f"its answer is not valid: {exc}") from exc
