"""What other members of a cluster say about themselves."""

from typing import Any, Final

from ..http.client import HTTPClient, RequestFailed
from ..protocol.untrusted_json import decode_json
from .context import MemberContext

_MOST_BYTES: Final = 256 * 1024


class OtherMembers:
    """Asks members over HTTP, or over HTTPS if the member's link has TLS.

    Args:
        context: The member that asks.
        timeout_s: For the connection, and for the answer.
    """

    def __init__(self, context: MemberContext, timeout_s: float) -> None:
        self._context = context
        self._client = HTTPClient(
            connect_timeout_s=timeout_s,
            request_timeout_s=timeout_s,
            max_answer_bytes=_MOST_BYTES,
            tls=context.tls,
        )

    async def about(self, url: str) -> dict[str, Any]:
        """Return what `GET /cluster/member` answers.

        Args:
            url: `http://HOST:PORT` or `https://HOST:PORT`.

        Raises:
            RequestFailed: It does not answer, or refuses.
        """
        try:
            about = decode_json(await self._client.get(f"{url}/cluster/member", self._context.secret.read()))
        except ValueError as exc:
            raise RequestFailed(str(exc)) from exc
        if not isinstance(about, dict):
            raise RequestFailed("it does not answer as a member of a cluster does")
        return about
