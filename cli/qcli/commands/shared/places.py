"""The places of files on the command line: paths and URLs, which may have secrets."""

from .engine import library_errors


def without_secrets(place: str) -> str:
    """Keep the secrets of a URL in this process, and return the URL without them, for requests and messages.

    Raises:
        Failure: The credentials of an object store cannot be used, or the URL is incomplete.
    """
    if ":" not in place:
        return place
    from trio_nsq.spark.places import keep_secrets

    with library_errors():
        return keep_secrets(place)
