"""Users of a provider: their names, groups and rights. Pure."""

from base64 import urlsafe_b64encode
from collections.abc import Mapping
from functools import lru_cache
from hashlib import sha256
from typing import Any

from ...access.policy import Identity
from ..access.rights import NOTHING, Rights, rights_of
from ..access.sessions import User
from .options import OIDCOptions, grants_of

_MAX_NAME_BYTES = 128
_NAMES = ("email", "preferred_username", "name")
_DIGEST_BYTES = 6
_DIGEST_CHARACTERS = 8
_MAX_CACHED = 1000


def user_of(claims: Mapping[str, Any], options: OIDCOptions) -> User:
    """Return the user that verified claims name."""
    subject = claims["sub"]
    known = {each.group for each in options.grants} & groups_of(claims, options.groups_claim)
    groups = "".join(sorted(map(group_digest, known)))
    return User(_name(claims) or subject[:_MAX_NAME_BYTES], subject, provider_digest(options), groups)


def groups_of(claims: Mapping[str, Any], claim: str) -> frozenset[str]:
    """Return the groups of a user; none if the claim is missing or of another form.

    An e-mail address counts only if the provider has verified that it is the user's.
    """
    found = claims.get(claim)
    if claim == "email" and claims.get("email_verified") is not True:
        return frozenset()
    if isinstance(found, str):
        return frozenset((found,))
    return (
        frozenset(each for each in found if isinstance(each, str)) if isinstance(found, list) else frozenset()
    )


class UserRights:
    """What the users of a provider may do."""

    def __init__(self, options: OIDCOptions) -> None:
        self._provider = provider_digest(options)
        self._grants = options.grants
        self._by_digest = {group_digest(each.group): each.group for each in options.grants}
        self._of_groups = lru_cache(_MAX_CACHED)(self._compute)

    def of(self, user: User) -> Rights:
        """Return the rights of a user; `NOTHING` for one of another provider, or without a group that has roles."""
        return self._of_groups(user.groups) if user.provider == self._provider else NOTHING

    def _compute(self, groups: str) -> Rights:
        digests = (groups[at : at + _DIGEST_CHARACTERS] for at in range(0, len(groups), _DIGEST_CHARACTERS))
        names = frozenset(self._by_digest[each] for each in digests if each in self._by_digest)
        grants = grants_of(self._grants, names)
        return rights_of([Identity("", "oidc", grants)]) if grants else NOTHING


def provider_digest(options: OIDCOptions) -> str:
    """Return what stands for a provider and the console's client there: sessions of another one do not count."""
    return _digest(f"{options.issuer} {options.client_id}")


def group_digest(group: str) -> str:
    """Return what stands for a group in cookies. Only groups of the options are looked up by it."""
    return _digest(group)


def _digest(text: str) -> str:
    return urlsafe_b64encode(sha256(text.encode("utf-8", "surrogatepass")).digest()[:_DIGEST_BYTES]).decode()


def _name(claims: Mapping[str, Any]) -> str:
    for claim in _NAMES:
        name = claims.get(claim)
        if (
            not isinstance(name, str)
            or not name.isprintable()
            or not 0 < len(name.encode()) <= _MAX_NAME_BYTES
        ):
            continue
        if claim != "email" or claims.get("email_verified") is not False:
            return name
    return ""
