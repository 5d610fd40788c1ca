"""The reasons why a connection or a request has failed, for texts of errors."""

import os
import socket
import ssl

from ..text.wording import untrusted_certificate

_MAX_REASON = 300


def innermost(error: BaseException) -> BaseException:
    """Return the error that has caused an error, from the last of several attempts to connect."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner.exceptions[-1] if isinstance(inner, BaseExceptionGroup) else inner
    return error


def reason_of(error: BaseException) -> str:
    """Return the reason of an error: the system's, if it has one."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return untrusted_certificate(error.verify_message)
    if isinstance(error, OSError) and error.errno and not isinstance(error, ssl.SSLError | socket.gaierror):
        return os.strerror(error.errno)  # trio adds the address to the text of the error
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error) or type(error).__name__)[:_MAX_REASON]
