"""One context: the addresses of a cluster, and how to connect to it."""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ..framework import params
from ..framework.command import did_you_mean

ADDRESSES = ("nsqd_tcp_address", "nsqd_http_address", "lookupd_http_address")
"""The keys of addresses. A context has at least one of them."""
SECRETS = ("auth_secret_file", "auth_secret_command", "auth_secret_keyring")
"""The keys that say where the secret is. A context has at most one of them."""


def _text(text: str) -> str:
    if not text.strip():
        raise click.BadParameter("it is empty.")
    return text


def _command(text: str) -> str:
    try:
        words = shlex.split(_text(text))
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is not a command: {error}.") from error
    if not words:
        raise click.BadParameter(f"{text!r} is not a command.")
    return text


def keyring_entry(text: str) -> tuple[str, str]:
    """Return service and user name of an entry. Raises BadParameter."""
    service, slash, user = text.rpartition("/")
    if not (slash and service and user):
        raise click.BadParameter(f"{text!r} is not SERVICE/USER.")
    return service, user


def _keyring(text: str) -> str:
    keyring_entry(text)
    return text


COLORS = ("red", "orange", "green", "blue", "purple", "gray")
"""Those of the web console's label."""


def _color(text: str) -> str:
    if text not in COLORS:
        raise click.BadParameter(f"{text!r} is not one of {', '.join(COLORS)}.")
    return text


@dataclass(frozen=True, slots=True)
class Key:
    """A key of a context: the name of the command line option that it sets, with underscores.

    Attributes:
        type: `list` (of strings), `str` or `bool`.
        check: Returns one value, checked. Raises BadParameter.
        is_path: Whether the value is a file: relative paths begin at the folder of the contexts.
    """

    type: type
    check: Callable[[str], str] = _text
    is_path: bool = False


KEYS: Mapping[str, Key] = {
    "description": Key(str),
    "title_color": Key(str, _color),
    "nsqd_tcp_address": Key(list, params.tcp_address),
    "nsqd_http_address": Key(list, params.http_address),
    "lookupd_http_address": Key(list, params.lookupd_address),
    "lookupd_allowed_host": Key(list),
    "tls": Key(bool),
    "tls_root_ca_file": Key(str, is_path=True),
    "tls_cert": Key(str, is_path=True),
    "tls_key": Key(str, is_path=True),
    "tls_insecure_skip_verify": Key(bool),
    "auth_secret_file": Key(str, is_path=True),
    "auth_secret_command": Key(str, _command),
    "auth_secret_keyring": Key(str, _keyring),
    "snappy": Key(bool),
    "deflate": Key(bool),
}

_EXCLUSIVE = (SECRETS, ("snappy", "deflate"))


class ContextError(ValueError):
    """A context is not valid.

    Attributes:
        key: The key that is wrong; None: the context as a whole.
    """

    def __init__(self, text: str, key: str | None = None) -> None:
        super().__init__(text)
        self.key = key


@dataclass(frozen=True, slots=True)
class Context:
    """A context that is valid.

    Attributes:
        values: Values by key. A list is a tuple; a path is absolute.
    """

    name: str
    values: Mapping[str, Any]

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(address for key in ADDRESSES for address in self.values.get(key, ()))

    @property
    def secret(self) -> tuple[str, str] | None:
        """The key that says where the secret is, and its value; None: there is no secret."""
        return next(((key, self.values[key]) for key in SECRETS if key in self.values), None)


def option_of(key: str) -> str:
    return "--" + key.replace("_", "-")


def checked_context(name: str, table: object, folder: Path) -> Context:
    """Return the context that a table of the file holds. Raises ContextError.

    Args:
        name: The context's name.
        table: The table, as parsed.
        folder: The folder that relative paths begin at.
    """
    if not isinstance(table, dict):
        raise ContextError("it is not a table")
    values = {key: _value(key, value, folder) for key, value in table.items()}
    for keys in _EXCLUSIVE:
        found = [key for key in keys if values.get(key)]
        if len(found) > 1:
            raise ContextError(f"{found[0]} and {found[1]} exclude each other", found[1])
    if "tls_key" in values and "tls_cert" not in values:
        raise ContextError("tls_key needs tls_cert", "tls_key")
    context = Context(name, values)
    if not context.addresses:
        raise ContextError(f"it has no address: {', '.join(ADDRESSES[:-1])} or {ADDRESSES[-1]}")
    return context


def _value(key: str, value: object, folder: Path) -> Any:
    if key == "auth_secret":
        raise ContextError(f"a context holds no secret: use {', '.join(SECRETS[:-1])} or {SECRETS[-1]}", key)
    known = KEYS.get(key)
    if known is None:
        raise ContextError(f"unknown key{did_you_mean(key, list(KEYS))}", key)
    try:
        if known.type is list:
            texts = [value] if isinstance(value, str) else value
            if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
                raise click.BadParameter("it is not a list of strings")
            return tuple(known.check(text) for text in texts)
        if type(value) is not known.type:
            raise click.BadParameter(
                "it is not true or false" if known.type is bool else "it is not a string"
            )
        if not isinstance(value, str):
            return value
        text = known.check(value)
        return str(folder / Path(text).expanduser()) if known.is_path else text
    except click.BadParameter as error:
        raise ContextError(error.message.rstrip("."), key) from error
    except RuntimeError as error:  # ~user, and no such user
        raise ContextError(str(error), key) from error
