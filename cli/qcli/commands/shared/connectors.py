"""Runs a connector of `to-file`, `to-http` or `to-nsq` until a signal, with its errors as failures."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from ...framework.daemon.run import raise_file_limit
from ...framework.errors import ExitCode, Failure, leaf_exceptions
from ...framework.output import show_library_warnings
from ...framework.signals import run_trio

_T = TypeVar("_T")


def run_connector(
    work: Callable[..., Awaitable[_T]],
    *args: object,
    failure_of: Callable[[Exception], Failure | None],
    quiet: bool,
) -> _T:
    """Run the work as `run_trio` does.

    Raises Failure for the first error that `failure_of` has one for; other errors are defects.
    """
    show_library_warnings(notes=not quiet)
    raise_file_limit()
    try:
        return run_trio(work, *args)
    except Exception as group:
        for error in leaf_exceptions(group):
            failure = error if isinstance(error, Failure) else None
            if isinstance(error, Exception) and (failure := failure or failure_of(error)) is not None:
                raise failure from group
        raise


def failure_with(text: str, code: ExitCode = ExitCode.FAILURE) -> Failure:
    """Return the failure for the text of one of the library's errors."""
    return Failure(f"{text[0].upper()}{text[1:]}.", code)
