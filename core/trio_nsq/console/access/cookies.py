"""The cookies of the console: `Set-Cookie` headers."""

from .request_head import RequestHead


def session_cookie(incoming: RequestHead) -> str:
    """Return the name of the cookie with the session. It has the port: browsers send cookies to all ports of a host."""
    return f"trio_nsq_session_{incoming.port}"


def visitor_cookie(incoming: RequestHead) -> str:
    """Return the name of the cookie of a viewer without a session."""
    return f"trio_nsq_visitor_{incoming.port}"


def login_cookie(incoming: RequestHead) -> str:
    """Return the name of the cookie of a login at an OpenID Connect provider that is not finished yet."""
    return f"trio_nsq_oidc_{incoming.port}"


def cookie_header(
    name: str, value: str, *, path: str, strict: bool, secure: bool, max_age_s: int | None = None
) -> str:
    """Return a `Set-Cookie` header.

    Args:
        path: Below which the browser sends it.
        strict: Not even after a click on a link of another site. Otherwise also then.
        secure: Over https only.
        max_age_s: How long the browser keeps it; 0 deletes it; None: until it is closed.
    """
    parts = [f"{name}={value}", f"Path={path}", "HttpOnly", f"SameSite={'Strict' if strict else 'Lax'}"]
    if secure:
        parts.append("Secure")
    if max_age_s is not None:
        parts.append(f"Max-Age={max_age_s}")
    return "; ".join(parts)
