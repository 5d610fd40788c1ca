"""Reading segments as they will be after the next start of the broker, without changing them."""

from pathlib import Path

from ..errors import LogError
from ..files import Files, OverlayFiles
from .file import write_ahead_files
from .replay import Replay


def replayed_files(data_path: Path) -> tuple[Files, list[tuple[Path, str]]]:
    """Return the files of a data folder as they will be after the next start of the broker.

    A broker may be running, and delete write-ahead files meanwhile: then the topics' segments have what was in them.

    Returns:
        The files; and what is damaged in write-ahead files, or keeps them from being read.
    """
    files = OverlayFiles()
    try:
        if not write_ahead_files(data_path, files.names(data_path)):
            return Files(), []
        replay = Replay(files, data_path)
        problems = list(replay.damage)
        for topic in replay.topics:
            try:
                replay.apply(topic, data_path / "topics" / f"{topic}.topic")
            except LogError as exc:
                problems.append((data_path, str(exc)))
    except (OSError, LogError, ValueError) as exc:
        return Files(), [(data_path, f"the write-ahead log cannot be read: {exc}")]
    return files, problems
