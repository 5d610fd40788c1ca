"""The `qcli` command lines that do the same as the console's actions, quoted for a shell."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from ...protocol.address import without_secrets


@dataclass(frozen=True, slots=True)
class Fleet:
    """The addresses of a console, for command lines. Secrets in them are not shown.

    Attributes:
        brokers: HTTP addresses that were given.
        lookupds: Discovery services.
        allowed_hosts: For `--lookupd-allowed-host`.
    """

    brokers: Sequence[str] = ()
    lookupds: Sequence[str] = ()
    allowed_hosts: Sequence[str] = ()

    @property
    def flags(self) -> list[str]:
        """The options that name all brokers."""
        return [
            *_flag("--nsqd-http-address", self.brokers),
            *_flag("--lookupd-http-address", self.lookupds),
            *(_flag("--lookupd-allowed-host", self.allowed_hosts) if self.lookupds else ()),
        ]


def on(addresses: Sequence[str]) -> list[str]:
    return _flag("--nsqd-http-address", addresses)


def line(*words: str) -> str:
    return shlex.join(["qcli", *words])


def create(fleet: Fleet, topic: str, channel: str = "") -> str:
    commands = [line("topic", "create", topic, *fleet.flags)]
    if channel:
        commands.append(line("channel", "create", f"{topic}/{channel}", *fleet.flags))
    return " && ".join(commands)


def change(fleet: Fleet, action: str, topic: str, channel: str = "") -> str:
    words = ["channel" if channel else "topic", action]
    if action == "delete" and fleet.lookupds:
        words.append("--everywhere")
    if action in ("delete", "empty"):
        words.append("--yes")
    return line(*words, f"{topic}/{channel}" if channel else topic, *fleet.flags)


def tombstone(fleet: Fleet, topic: str, node: str, address: str) -> str:
    hide = line("tombstone", topic, node, *_flag("--lookupd-http-address", fleet.lookupds))
    return " && ".join([hide, line("topic", "delete", "--yes", topic, *on([address]))])


def drain(address: str, *, stop: bool) -> str:
    return line("drain", *(["--stop"] if stop else []), *on([address]))


def switch_leader(address: str, member: str) -> str:
    return line("cluster", "switch", member, "--yes", *on([address]))


def remove_member(address: str, member: str) -> str:
    return line("cluster", "remove", member, "--yes", *on([address]))


def seek(addresses: Sequence[str], topic: str, channel: str, to: str) -> str:
    """Move a channel; `to` is a position as `qcli` takes it."""
    return line("channel", "seek", f"{topic}/{channel}", "--to", to, "--yes", *on(addresses))


def disconnect(addresses: Sequence[str], topic: str, channel: str, client: str | None) -> str:
    """Disconnect the consumers of a channel, or those with an id or address."""
    which = ["--all"] if client is None else ["--client", client]
    return line("channel", "disconnect", f"{topic}/{channel}", *which, *on(addresses))


def dead_letters(
    addresses: Sequence[str],
    verb: str,
    topic: str,
    *,
    origin: str = "",
    reason: str = "",
    ids: Sequence[str] = (),
    to_topic: bool = False,
) -> str:
    words = ["dlq", verb, topic]
    words += ["--origin", origin] if origin else []
    words += ["--reason", reason] if reason else []
    words += [word for each in ids for word in ("--id", each)]
    words += ["--to-topic"] if to_topic and verb == "requeue" else []
    words += ["--yes"] if verb == "drop" else []
    return line(*words, *on(addresses))


def cancel(addresses: Sequence[str], topic: str, channel: str, ids: Sequence[str]) -> str:
    return line("deferred", "cancel", f"{topic}/{channel}", *ids, *on(addresses))


def cancel_all(addresses: Sequence[str], topic: str, channel: str) -> str:
    """Cancel the deferred messages of a channel, at most 10,000."""
    name = f"{topic}/{channel}"
    listing = line("deferred", "list", name, "-n", "10000", "--format", "json", *on(addresses))
    return f"{listing} | jq -r .id | xargs {line('deferred', 'cancel', name, *on(addresses))}"


def settings(
    addresses: Sequence[str], topic: str, channel: str, assignments: Sequence[tuple[str, str]]
) -> str:
    """Change settings; `assignments` are names and texts as `qcli` takes them."""
    words = ["channel", "set", f"{topic}/{channel}"] if channel else ["topic", "set", topic]
    words += [] if channel else ["--yes"]
    return line(*words, *(f"{name}={text}" for name, text in assignments), *on(addresses))


def show_settings(addresses: Sequence[str], topic: str, channel: str) -> str:
    words = ["channel", "settings", f"{topic}/{channel}"] if channel else ["topic", "settings", topic]
    return line(*words, *on(addresses))


def export_definitions(fleet: Fleet) -> str:
    return line("definitions", "export", *fleet.flags) + " > definitions.json"


def apply_definitions(fleet: Fleet, *, delete: bool) -> str:
    return line(
        "definitions",
        "apply",
        "definitions.json",
        *(["--delete"] if delete else []),
        "--dry-run",
        *fleet.flags,
    )


def _flag(option: str, values: Sequence[str]) -> list[str]:
    return [option, ",".join(map(without_secrets, values))] if values else []
