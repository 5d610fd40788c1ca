"""Verifies ID tokens: their signature and claims. Pure.

joserfc is imported inside functions: the console needs it only if a provider is configured.
"""

from typing import TYPE_CHECKING, Any

from ...protocol.errors import NSQError

if TYPE_CHECKING:
    from joserfc.jwk import Key, KeySet

CLOCK_SKEW_S = 60
"""The clocks of the provider and of this machine may differ by so much."""
MAX_SUBJECT_CHARACTERS = 255
_MAX_HEADER_BYTES = 8 * 1024
_MAX_PAYLOAD_BYTES = 512 * 1024
"""A user may be in thousands of groups."""


class InvalidIDToken(NSQError):
    """An ID token is not accepted. The text gives the reason."""


class UnknownKey(InvalidIDToken):
    """No key of the provider has the id that the ID token names: the provider may have a new one."""


def parse_keys(value: Any) -> "KeySet":
    """Parse a JSON Web Key Set: the public keys for signatures. Others are left out. Raises ValueError."""
    from joserfc.jwk import KeySet

    listed = value.get("keys") if isinstance(value, dict) else None
    if not isinstance(listed, list):
        raise ValueError("the key set has no list of keys")
    keys = [key for each in listed if (key := _public_key(each)) is not None]
    if not keys:
        raise ValueError("the key set has no public key for signatures")
    return KeySet(keys)


def _public_key(value: Any) -> "Key | None":
    from joserfc.errors import JoseError
    from joserfc.jwk import JWKRegistry

    if not isinstance(value, dict) or value.get("kty") not in ("RSA", "EC", "OKP"):
        return None
    if value.get("use", "sig") != "sig":
        return None
    try:
        return JWKRegistry.import_key(value)
    except (JoseError, ValueError, TypeError, KeyError):
        return None  # RFC 7517: a key that is not understood does not spoil the others


def read_id_token(
    token: str,
    keys: "KeySet",
    *,
    issuer: str,
    client_id: str,
    nonce: str,
    algorithms: tuple[str, ...],
    now_s: float,
) -> dict[str, Any]:
    """Return the claims of an ID token.

    Args:
        nonce: The one that the console has sent for this login.
        algorithms: Of `ALGORITHMS`.
        now_s: Unix seconds.

    Raises:
        UnknownKey: No key has the id that the token names.
        InvalidIDToken: The token is not signed by the provider, not for this login, or has expired.
    """
    from joserfc import jwt
    from joserfc.errors import InvalidKeyIdError, JoseError
    from joserfc.jws import JWSRegistry

    registry = JWSRegistry(algorithms=algorithms, strict_check_header=False)
    registry.max_header_length, registry.max_payload_length = _MAX_HEADER_BYTES, _MAX_PAYLOAD_BYTES
    registered = jwt.JWTClaimsRegistry(
        now=int(now_s),
        leeway=CLOCK_SKEW_S,
        iss={"essential": True, "value": issuer},
        sub={"essential": True},
        aud={"essential": True, "value": client_id},
        exp={"essential": True},
        iat={"essential": True},
        nonce={"essential": True, "value": nonce},
    )
    try:
        claims = jwt.decode(token, keys, registry=registry).claims
        registered.validate(claims)
    except InvalidKeyIdError as exc:
        raise UnknownKey("the ID token is signed with a key that the provider does not list") from exc
    except (JoseError, ValueError, TypeError, KeyError, RecursionError) as exc:
        reason = str(exc) if isinstance(exc, JoseError) else "it is not a signed JSON Web Token"
        raise InvalidIDToken(f"the ID token is not valid: {reason}") from exc
    _check(claims, client_id, nonce)
    return claims


def _check(claims: dict[str, Any], client_id: str, nonce: str) -> None:
    """Check what the library leaves to the client. Raises InvalidIDToken."""
    subject, audience, party = claims["sub"], claims["aud"], claims.get("azp")
    if not isinstance(claims["nonce"], str) or claims["nonce"] != nonce:
        raise InvalidIDToken("the ID token is not valid: its nonce is that of another login")
    if not 0 < len(subject) <= MAX_SUBJECT_CHARACTERS or not (subject.isascii() and subject.isprintable()):
        raise InvalidIDToken(
            f"the ID token is not valid: its subject is not 1 to {MAX_SUBJECT_CHARACTERS} of ASCII"
        )
    if party is not None and party != client_id:
        raise InvalidIDToken("the ID token is not valid: its authorized party (azp) is another client")
    if party is None and isinstance(audience, list) and len(audience) > 1:
        raise InvalidIDToken("the ID token is not valid: it is for several clients, and has no azp")
