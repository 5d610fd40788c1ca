"""What a provider says about itself: the discovery document. Pure."""

from dataclasses import dataclass
from typing import Any, Literal

from .options import check_url

ALGORITHMS = (
    "RS256",
    "RS384",
    "RS512",
    "PS256",
    "PS384",
    "PS512",
    "ES256",
    "ES384",
    "ES512",
    "Ed25519",
)
"""Signatures of ID tokens that are accepted: those with a public key. With HMAC, a public key could be taken for the
secret, and `none` is no signature."""

ClientAuthentication = Literal["client_secret_basic", "client_secret_post"]


@dataclass(frozen=True, slots=True)
class Metadata:
    """The endpoints of a provider.

    Attributes:
        userinfo_endpoint, end_session_endpoint: Empty: the provider has none.
        authentication: How the client sends its secret.
        algorithms: Those of `ALGORITHMS` with which the provider signs.
        sends_issuer: Whether the provider names itself when it sends the browser back (RFC 9207).
    """

    authorization_endpoint: str
    token_endpoint: str
    jwks_uri: str
    userinfo_endpoint: str
    end_session_endpoint: str
    authentication: ClientAuthentication
    algorithms: tuple[str, ...]
    sends_issuer: bool


def parse_metadata(value: Any, issuer: str) -> Metadata:
    """Parse a discovery document. Raises ValueError: it is not valid, or is that of another issuer."""
    if not isinstance(value, dict):
        raise ValueError("the discovery document is not a JSON object")
    named = value.get("issuer")
    if named != issuer:
        raise ValueError(
            f"the discovery document is that of the issuer {named!r}: --oidc-issuer must be the same"
        )
    offered = _texts(value, "id_token_signing_alg_values_supported", ["RS256"])
    algorithms = tuple(name for name in ALGORITHMS if name in offered)
    if not algorithms:
        raise ValueError(
            f"the provider signs with {', '.join(offered)}; needed is one of {', '.join(ALGORITHMS)}"
        )
    methods = _texts(value, "token_endpoint_auth_methods_supported", ["client_secret_basic"])
    only_post = "client_secret_basic" not in methods and "client_secret_post" in methods
    return Metadata(
        _url(value, "authorization_endpoint"),
        _url(value, "token_endpoint"),
        _url(value, "jwks_uri"),
        _url(value, "userinfo_endpoint", optional=True),
        _url(value, "end_session_endpoint", optional=True),
        "client_secret_post" if only_post else "client_secret_basic",
        algorithms,
        value.get("authorization_response_iss_parameter_supported") is True,
    )


def _url(value: dict[str, Any], key: str, *, optional: bool = False) -> str:
    found = value.get(key)
    if found is None and optional:
        return ""
    if not isinstance(found, str):
        raise ValueError(f"the discovery document has no {key}")
    try:
        check_url(found)
    except ValueError as exc:
        raise ValueError(f"{key}: {exc}") from None
    return found


def _texts(value: dict[str, Any], key: str, default: list[str]) -> list[str]:
    found = value.get(key, default)
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise ValueError(f"the discovery document's {key} is not a list of strings")
    return found
