"""What the audit log says about a change, besides the request."""

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from ..upstream.client import Results

_DETAILS = "audit"
_HAS_CHANGED_NOTHING = "has_changed_nothing"


def note_change(
    request: Request,
    *,
    topic: str = "",
    channel: str = "",
    node: str = "",
    sequence: int | None = None,
    results: Results[Any] | None = None,
    count: int | None = None,
) -> None:
    """Note for the audit log what a request has changed; the names in its path are noted anyway.

    Args:
        results: What the brokers have answered.
        node: The broker, of a request about one of its messages.
        sequence: Of this message.
        count: Messages.
    """
    details: dict[str, str | int] = {"topic": topic, "channel": channel, "node": node}
    if sequence is not None:
        details["sequence"] = sequence
    if results is not None:
        details["done"] = len(results.values)
        failed = [f"{address} {error.code or error.reason}" for address, error in results.errors.items()]
        details |= {"failed": len(failed), "reason": "; ".join(failed)}
    if count is not None:
        details["count"] = count
    request.scope["state"][_DETAILS] = {key: value for key, value in details.items() if value != ""}


def note_nothing_changed(request: Request) -> None:
    """Note that a request was only a question, such as a form whose answer is a page that asks to confirm."""
    request.scope["state"][_HAS_CHANGED_NOTHING] = True


def has_changed_nothing(scope: Mapping[str, Any]) -> bool:
    """Return whether a request was only a question."""
    return _HAS_CHANGED_NOTHING in scope["state"]


def noted_change(scope: Mapping[str, Any]) -> dict[str, str | int]:
    """Return what was noted."""
    parts = {
        key: value
        for key, value in scope.get("path_params", {}).items()
        if key in ("topic", "channel", "node", "member")
    }
    return {**parts, **scope["state"].get(_DETAILS, {})}
