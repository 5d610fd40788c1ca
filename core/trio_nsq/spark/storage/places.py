"""The names of places: paths and URIs."""

from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

_SECRET_OPTIONS = ("key", "secret", "token", "password", "signature", "sig", "credential")
"""Parts of the names of URI options that are not shown."""


def split_place(place: str) -> tuple[str, str]:
    """Return the folder of a file, and its name."""
    head, mark, query = place.partition("?") if local_path(place) is None else (place, "", "")
    folder, _, name = head.rstrip("/").rpartition("/")
    return f"{folder or '/'}{mark}{query}", name


def local_path(place: str) -> Path | None:
    """Return the path of a local folder; None if the place is a URI of another file system."""
    if place.startswith("file://"):
        return Path(unquote(place.removeprefix("file://")))
    return None if "://" in place else Path(place)


def shown_place(place: str) -> str:
    """Return a place without the secrets that its URI may have."""
    if local_path(place) is not None:
        return place
    scheme, network, path, query, _ = urlsplit(place)
    options = [
        (name, "***" if any(part in name.lower() for part in _SECRET_OPTIONS) else value)
        for name, value in parse_qsl(query, keep_blank_values=True)
    ]
    _, at, host = network.rpartition("@")
    if at and scheme in ("abfs", "abfss"):
        host = network  # the container is before the `@`
    return urlunsplit((scheme, host, path, urlencode(options, safe="*/:"), ""))
