"""What commands say about the archive of a broker."""

from trio_nsq.fleet.archive import Archive

from ...terminal.figures import short_age


def note_of_archive(archive: Archive) -> str:
    """Return how far an archive is, in a few words."""
    behind = f"{short_age(1000 * archive.lag_s)} behind"
    if archive.error:
        return f"archive not written, {behind}"
    if archive.state != "archiving":
        return f"archive: {archive.activity}"
    return f"archive {behind}" if archive.is_late else "archived"
