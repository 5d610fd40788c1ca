"""Read nsqd.dat: the topics and channels of an nsqd, and which of them are paused."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..broker.storage.data_folder import NSQD_FILE
from ..log.inspection.findings import Finding, Kind
from ..protocol import is_ephemeral, is_valid_name
from ..protocol.errors import NSQError
from ..protocol.untrusted_json import decode_json


class ImportRefused(NSQError):
    """The import is refused; the text has the reason and what to do."""


@dataclass(frozen=True, slots=True)
class ChannelMetadata:
    name: str
    paused: bool


@dataclass(frozen=True, slots=True)
class TopicMetadata:
    name: str
    paused: bool
    channels: tuple[ChannelMetadata, ...]


def read_metadata(folder: Path) -> tuple[list[TopicMetadata], list[Finding]]:
    """Read the topics of an nsqd, in its order. Names that are invalid (as in nsqd) or ephemeral are findings.

    Raises:
        ImportRefused: The file does not exist, or is damaged.
        OSError: The operating system returned an error.
    """
    path = folder / NSQD_FILE
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise ImportRefused(f"{folder} is not the data folder of an nsqd: it has no {NSQD_FILE}") from None
    findings: list[Finding] = []
    try:
        # nsqd writes null for an empty list.
        topics = [_topic(entry, path, findings) for entry in decode_json(content)["topics"] or []]
    except (ValueError, KeyError, TypeError) as exc:
        raise ImportRefused(f"{path} is damaged (nsqd would not start with it either): {exc!r}") from exc
    merged = {topic.name: topic for topic in topics if topic is not None}
    return list(merged.values()), findings


def _topic(entry: dict[str, Any], path: Path, findings: list[Finding]) -> TopicMetadata | None:
    name = entry["name"]
    if not _is_kept(name, f"topic {name!r}", path, findings):
        return None
    channels = [
        ChannelMetadata(each["name"], bool(each["paused"]))
        for each in entry["channels"] or []
        if _is_kept(each["name"], f"channel {each['name']!r} of topic {name}", path, findings)
    ]
    unique = {channel.name: channel for channel in channels}
    return TopicMetadata(name, bool(entry["paused"]), tuple(unique.values()))


def _is_kept(name: str, which: str, path: Path, findings: list[Finding]) -> bool:
    if not is_valid_name(name):
        what = f"{which}: not a valid name, skipped"
    elif is_ephemeral(name):
        what = f"{which}: ephemeral, skipped"
    else:
        return True
    findings.append(Finding(Kind.NOTE, path, 0, 0, what))
    return False
