"""Calls of an object store: each ends by a deadline, signals are handled meanwhile, and errors are one sentence.

obstore's own retries are off: only so is it known whether an earlier attempt may have been applied.
"""

import random
import re
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, NoReturn, TypeVar

from ..event_loop.fan_out import start
from ..event_loop.retries import Delays
from .interface import StorageError

DEADLINE_S = 30.0
FIRST_DEADLINE_S = 10.0
"""Until the store has answered once: it is more likely that a setting is wrong."""
ATTEMPT_S = 10.0
"""The time-out of one request."""
BACKOFF_S, _MAX_BACKOFF_S = 0.1, 3.0
_GRACE_S = 2.0
_RETRIED = frozenset({408, 425, 429})

_Found = TypeVar("_Found")


class Patience(NamedTuple):
    """Time limits for an object store.

    Attributes:
        attempt_s: The time-out of one request; longer for large objects.
        deadline_s: No new attempt of a call starts after this time; later for large objects.
    """

    attempt_s: float = ATTEMPT_S
    deadline_s: float = DEADLINE_S


PATIENCE = Patience()


class Refused(Exception):
    """A condition of a request was not met: the object exists, or has another version.

    Attributes:
        repeated: Whether an earlier attempt failed, which may have been applied nevertheless.
    """

    def __init__(self, *, repeated: bool) -> None:
        super().__init__()
        self.repeated = repeated


class Calls:
    """Calls of one object store.

    Args:
        bucket: What the error messages call the bucket, such as `the bucket clicks`.
        credentials: What gives credentials, for error messages, such as `AWS_PROFILE`.
    """

    def __init__(self, bucket: str, credentials: str) -> None:
        self._bucket = bucket
        self._credentials = credentials
        self._has_answered = False

    def run(
        self,
        what: str,
        work: Callable[[], _Found],
        patience: Patience = PATIENCE,
    ) -> _Found:
        """Call the store until it answers, in another thread.

        Args:
            what: What fails otherwise, for the message, such as `s3://bucket/name cannot be read`.
            work: One request, which obstore ends after the time of an attempt.
            patience: The time limits.

        Raises:
            FileNotFoundError: The object does not exist.
            Refused: A condition was not met.
            StorageError: The store refuses the request, or does not answer by the deadline.
        """
        deadline_s = patience.deadline_s
        if not self._has_answered:
            deadline_s = min(deadline_s, FIRST_DEADLINE_S)
        began_s = time.monotonic()
        pauses, repeated = Delays(BACKOFF_S, _MAX_BACKOFF_S, random.random), False
        while True:
            try:
                value = _in_thread(work, patience.attempt_s + _GRACE_S)
            except Exception as exc:
                exc.args = (_without_queries(str(exc)),)  # it is shown as the cause
                failure = _Failure.of(exc)
                self._has_answered |= failure.status is not None
                if failure.is_refused:
                    raise Refused(repeated=repeated) from exc
                if failure.code in _NO_BUCKET:
                    raise StorageError(f"{what}: {self._bucket} does not exist") from exc
                if failure.status == 404 and failure.code in _NO_OBJECT:
                    raise FileNotFoundError(f"{what}: it does not exist") from exc
                if failure.code == "NoCredentials":
                    raise StorageError(f"{what}: there are no credentials: set {self._credentials}") from exc
                if not failure.is_transient:
                    raise StorageError(f"{what}: {failure.reason}") from exc
                elapsed_s, pause_s = time.monotonic() - began_s, pauses.next_s()
                if elapsed_s + pause_s > deadline_s:
                    self._give_up(what, failure, elapsed_s, exc)
            else:
                self._has_answered = True
                return value
            repeated = True
            threading.Event().wait(pause_s)

    def _give_up(self, what: str, failure: "_Failure", elapsed_s: float, exc: Exception) -> NoReturn:
        raise StorageError(f"{what}: {failure.reason}; this was tried for {elapsed_s:.0f} s") from exc


def _in_thread(work: Callable[[], _Found], timeout_s: float) -> _Found:
    """Call a function in another thread, so that signals are handled meanwhile.

    A thread whose time is over is left alone. It ends with the process, and what it still does is conditional.
    """
    return start(work).result(timeout_s)


# ---------------------------------------------------------------------- errors

_NO_BUCKET = frozenset({"NoSuchBucket", "ContainerNotFound", "ContainerBeingDeleted"})
_NO_OBJECT = frozenset({"", "NoSuchKey", "BlobNotFound", "ResourceNotFound", "notFound"})
_STATUS = re.compile(r"status code: (\d{3})|\bstatus: (\d{3})\b")
_CODE = re.compile(r"<Code>\s*([^<\s]+)\s*</Code>|\"code\":\s*\"(\w+)\"")
_MESSAGE = re.compile(
    r"<Message>\s*([^<]*?)\s*(?:RequestId|</Message>)|\"message\":\s*\"([^\"]*)\"", re.DOTALL
)
_CREDENTIALS = re.compile(
    r"169\.254\.169\.254|169\.254\.170\.|computeMetadata|token request|MissingCredentials", re.I
)
_HOST = re.compile(r"https?://[^\s/?]+")
_REASONS = (
    (re.compile(r"dns error|failed to lookup"), "the name of the store {} cannot be resolved", True),
    (re.compile(r"ConnectionRefused"), "the store {} refuses connections", True),
    (
        re.compile(r"ConnectionReset|IncompleteMessage|BrokenPipe|connection closed"),
        "the store {} closed the connection",
        True,
    ),
    (re.compile(r"[Cc]ertificate|UnknownIssuer"), "the certificate of the store {} is not trusted", False),
    (re.compile(r"InvalidContentType|InvalidMessage"), "the store {} uses http, not https", False),
    (re.compile(r"TimedOut|timed out|Timeout"), "the store {} did not answer in time", True),
    (re.compile(r"unreachable", re.IGNORECASE), "the network of the store {} is unreachable", True),
    (re.compile(r"HTTP error|HttpError"), "the connection to the store {} failed", True),
)
"""What is found in an error without an HTTP status, the reason, and whether another attempt may help."""
_ADVICE = {
    "InvalidAccessKeyId": "the access key is unknown",
    "SignatureDoesNotMatch": "the secret key is wrong",
    "AuthenticationFailed": "the account key is wrong",
    "ExpiredToken": "the credentials have expired",
    "AuthorizationHeaderMalformed": "the region is wrong: set AWS_REGION",
    "IllegalLocationConstraintException": "the region is wrong: set AWS_REGION",
    "PermanentRedirect": "the region or the endpoint is wrong: set AWS_REGION or AWS_ENDPOINT_URL",
    "RequestTimeTooSkewed": "the clock of this machine is wrong",
}


class _Failure(NamedTuple):
    """What is known about an error of obstore.

    Attributes:
        status: The HTTP status; None: there was no response.
        code: The store's own code, such as `NoSuchBucket`; empty: none.
        reason: The reason, part of a sentence.
        is_refused: Whether a condition was not met.
        is_transient: Whether another attempt may help.
    """

    status: int | None
    code: str
    reason: str
    is_refused: bool = False
    is_transient: bool = False

    @classmethod
    def of(cls, error: Exception) -> "_Failure":
        from obstore import exceptions

        text = str(error)
        status, code = _first(_STATUS, text), _first(_CODE, text) or ""
        number = int(status) if status else None
        if isinstance(error, exceptions.AlreadyExistsError | exceptions.PreconditionError):
            return cls(number or 412, code, "", is_refused=True)
        if isinstance(error, FileNotFoundError) and number is None:
            return cls(404, code, "it does not exist")
        if isinstance(error, TimeoutError):
            return cls(None, "", "the store did not answer in time", is_transient=True)
        if _CREDENTIALS.search(text):
            return cls(None, "NoCredentials", "there are no credentials")
        if number is not None:
            return _of_status(number, code, text)
        if "redirect without LOCATION" in text or "BareRedirect" in text:
            return cls(301, "PermanentRedirect", _ADVICE["PermanentRedirect"])
        host = _HOST.search(text)
        for pattern, reason, transient in _REASONS:
            if pattern.search(text):
                return cls(
                    None,
                    "",
                    reason.format(host.group() if host else "").replace("store  ", "store "),
                    is_transient=transient,
                )
        first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
        return cls(None, "", _without_queries(first))


def _of_status(status: int, code: str, text: str) -> _Failure:
    message = _ADVICE.get(code) or _first(_MESSAGE, text) or ""
    words = " ".join(part for part in (f"HTTP {status}", code) if part)
    joint = " because " if code in _ADVICE else ", "
    if status in (401, 403):
        reason = f"access is denied ({words})" + (f"{joint}{message}" if message else "")
        return _Failure(status, code, reason + ": check the credentials" * (code not in _ADVICE))
    reason = f"the store answers {words}" + (f"{joint}{message.rstrip('.')}" if message else "")
    transient = status >= 500 or status in _RETRIED or code in ("SlowDown", "RequestTimeout")
    return _Failure(status, code, _without_queries(reason), is_transient=transient)


def _first(pattern: re.Pattern[str], text: str) -> str | None:
    found = pattern.search(text)
    return None if found is None else next((group for group in found.groups() if group is not None), None)


def _without_queries(text: str) -> str:
    """Remove the queries of URLs: those of Azure may have signatures."""
    return re.sub(r"\?[^\s\"']*", "", text)
