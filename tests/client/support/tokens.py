"""An auth file with a token for each role, and the brokers of a test.

- `AuthFile` writes the file, with one token for each role on all topics, and changes it.
- `SECRETS` are the tokens by role; `UNKNOWN` is one that no file has.
"""

from collections.abc import Iterable
from pathlib import Path

from trio_nsq.access.policy import ROLES, token_digest

SECRETS = {role: f"qnsq_{role}_of-a-test" for role in (*ROLES, "all")}
UNKNOWN = "qnsq_nobody_knows-this-one"


class AuthFile:
    """The auth file of a broker.

    Attributes:
        path: The file.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "auth.toml"
        self.write(SECRETS)

    def write(self, names: Iterable[str], topics: str = "*") -> None:
        """Give these tokens their roles on the topics that match; no other token is valid."""
        self.path.write_text("".join(_entry(name, topics) for name in names))


def _entry(name: str, topics: str) -> str:
    roles = ", ".join(f'"{role}"' for role in (ROLES if name == "all" else [name]))
    return (
        f'[[token]]\nname = "{name}"\nhash = "{token_digest(SECRETS[name].encode())}"\n'
        f'grants = [{{ roles = [{roles}], topics = ["{topics}"] }}]\n'
    )
