"""How members find their leader if no engine says who leads: they ask each other."""

import json
import logging
from collections.abc import Sequence
from typing import Final

import trio

from ..coordination.state import ClusterState, StateError, decode
from ..coordination.static import StaticCoordinator
from ..http.client import RequestFailed
from ..protocol.address import format_address
from .context import MemberContext
from .other_members import OtherMembers

logger: logging.Logger = logging.getLogger("trio_nsq.cluster")

_TIMEOUT_S: Final = 2.0


class StaticPeers:
    """Asks the other members of a cluster without an engine.

    Args:
        addresses: Of their HTTP ports; HTTPS if the member's link has TLS.
    """

    def __init__(self, context: MemberContext, addresses: Sequence[tuple[str, int]]) -> None:
        self._context = context
        scheme = "http" if context.tls is None else "https"
        self._urls = [f"{scheme}://{format_address(*each)}" for each in addresses]
        self._others = OtherMembers(context, _TIMEOUT_S)
        self._answers: dict[str, str] = {}

    async def learn(self, coordinator: StaticCoordinator) -> None:
        """Store who leads, or shall lead, if one of them says so. Raises CoordinatorError, StateError."""
        states: list[ClusterState] = []
        async with trio.open_nursery() as nursery:
            for url in self._urls:
                nursery.start_soon(self._ask, url, states)
        if not states:
            return
        newest = max(states, key=lambda state: state.epoch)
        seen = (await self._context.ask(coordinator.read)).state
        if seen is None or newest.epoch > seen.epoch or (newest.epoch == seen.epoch and newest != seen):
            await self._context.ask(coordinator.learn, newest)

    async def _ask(self, url: str, states: list[ClusterState]) -> None:
        reason = ""
        try:
            about = await self._others.about(url)
            if about.get("state") is not None:
                state = decode(json.dumps(about["state"]).encode())
                if state.cluster != self._context.membership.cluster:
                    reason = f"it belongs to the cluster {state.cluster}"
                elif about.get("role") == "leader" or state.successor:
                    states.append(state)
        except (RequestFailed, ValueError, StateError) as exc:
            reason = str(exc)
        if reason and reason != self._answers.get(url):
            logger.warning("the member at %s does not say who leads: %s", url, reason)
        self._answers[url] = reason
