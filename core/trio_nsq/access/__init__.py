"""Who may do what: identities, their grants, and the file of tokens. Shared by the broker and the discovery service.

Everything is synchronous, does no network IO and takes the time as a parameter; except `access` and `authentication`,
which are parts of a running server.

Names are imported on first use: clients need only `secret`, not the file of tokens.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attempts import FailedAttempts
    from .auth_file import AuthFileError, read_auth_file, token_digest
    from .patterns import Pattern, compile_glob
    from .policy import ROLES, Grant, Identity, Policy, Role, Rule

__all__ = [
    "ROLES",
    "AuthFileError",
    "FailedAttempts",
    "Grant",
    "Identity",
    "Pattern",
    "Policy",
    "Role",
    "Rule",
    "compile_glob",
    "read_auth_file",
    "token_digest",
]

_MODULES = {
    "AuthFileError": ".auth_file",
    "FailedAttempts": ".attempts",
    "Grant": ".policy",
    "Identity": ".policy",
    "Pattern": ".patterns",
    "Policy": ".policy",
    "ROLES": ".policy",
    "Role": ".policy",
    "Rule": ".policy",
    "compile_glob": ".patterns",
    "read_auth_file": ".auth_file",
    "token_digest": ".auth_file",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
