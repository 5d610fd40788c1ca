"""Who may do what: identities, their grants, and the file of tokens. Shared by the broker and the discovery service.

Everything is synchronous, does no network IO and takes the time as a parameter; except `access` and `authentication`,
which are parts of a running server.
"""

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
