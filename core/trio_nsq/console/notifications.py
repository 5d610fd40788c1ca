"""Tells an HTTP endpoint about each action, as nsqadmin's `--notification-http-endpoint`.

`Notifier.notify` never waits and never fails. One task sends what it queues, in order; an endpoint that fails or hangs
delays later notifications, and nothing else.
"""

import json
import logging
import platform
import time

import trio
from starlette.requests import HTTPConnection

from ..http.client import HTTPClient, RequestFailed
from ..protocol.address import format_address, without_secrets
from .access.viewer import viewer_of

logger: logging.Logger = logging.getLogger("trio_nsq.console")

MAX_WAITING = 1000
"""Notifications that wait for the endpoint; further ones are dropped."""
PAUSES_S = (1, 2, 4, 8, 16)
"""Pauses before the repetitions of a failed notification."""
_MAX_TEXT = 2000
_MAX_ANSWER_BYTES = 64 * 1024
_OPTIONAL = ("channel", "node", "user")
"""As nsqadmin: left out if empty."""


class Notifier:
    """Sends notifications to one endpoint.

    Args:
        endpoint: Its URL; empty: `notify` does nothing.
        connect_timeout_s, request_timeout_s: Limits of one attempt.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        connect_timeout_s: float,
        request_timeout_s: float,
    ) -> None:
        self._endpoint = endpoint
        self._client = HTTPClient(
            connect_timeout_s=connect_timeout_s,
            request_timeout_s=request_timeout_s,
            max_answer_bytes=_MAX_ANSWER_BYTES,
        )
        self._send, self._receive = trio.open_memory_channel[tuple[str, bytes]](MAX_WAITING)

    def notify(
        self, request: HTTPConnection, action: str, topic: str, channel: str = "", node: str = ""
    ) -> None:
        """Queue the notification of an action that was done, with nsqadmin's names.

        Args:
            request: The viewer's request.
            action: Such as `Change.name` or `tombstone_topic_producer`.
            node: The HTTP address of a broker that is hidden.
        """
        if not self._endpoint:
            return
        client = request.client
        notification = {
            "action": action,
            "topic": topic,
            "channel": channel,
            "node": node,
            "timestamp": int(time.time()),
            "user": viewer_of(request).name,
            "remote_ip": format_address(client.host, client.port) if client else "",
            "user_agent": request.headers.get("user-agent", "")[:_MAX_TEXT],
            "url": str(request.url)[:_MAX_TEXT],
            "via": platform.node(),
        }
        given = {key: value for key, value in notification.items() if value or key not in _OPTIONAL}
        try:
            self._send.send_nowait((f"{action} of {topic}: notification", json.dumps(given).encode()))
        except trio.WouldBlock:
            logger.error("%s of %s: notification dropped: %d others wait", action, topic, MAX_WAITING)

    async def run(self) -> None:
        """Send notifications until cancelled."""
        try:
            async for what, body in self._receive:
                await self._deliver(what, body)
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 1):
                await self._client.aclose()

    async def _deliver(self, what: str, body: bytes) -> None:
        place = without_secrets(self._endpoint)
        for pause_s in (*PAUSES_S, 0):
            reason, may_repeat = await self._post(body)
            if not reason:
                return
            if not pause_s or not may_repeat:
                break
            logger.warning("%s failed, repeated in %d s: %s: %s", what, pause_s, place, reason)
            await trio.sleep(pause_s)
        logger.error("%s dropped: %s: %s", what, place, reason)

    async def _post(self, body: bytes) -> tuple[str, bool]:
        """Make one attempt. Returns why it failed, "" if it succeeded; and whether to try again."""
        try:
            reply = await self._client.request("POST", self._endpoint, body, "application/json")
        except RequestFailed as exc:
            return str(exc), True
        if 200 <= reply.status < 300:
            return "", False
        return f"it answered with status {reply.status}", reply.status >= 500 or reply.status in (408, 429)
