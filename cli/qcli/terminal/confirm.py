"""Asks the user before messages are deleted."""

from __future__ import annotations

import sys

import click

from ..framework.errors import Failure
from ..framework.output import print_diagnostic


def confirm(question: str, what_it_does: str) -> None:
    """Let the user agree.

    Args:
        question: Without the answers there are.
        what_it_does: For the complaint that nobody can be asked: the beginning of a sentence.

    Raises:
        click.UsageError: Nobody is there to agree.
        click.Abort: Interrupted.
        Failure: The user did not agree; the end of the input, Ctrl-D, is a no.
    """
    if sys.stdin is None or not sys.stdin.isatty():
        raise click.UsageError(f"{what_it_does} and standard input is no terminal to ask on: say --yes.")
    try:
        agreed = click.confirm(question, err=True)
    except click.Abort as error:
        print_diagnostic("")  # the cursor still stands behind the question
        if not isinstance(error.__context__, EOFError):
            raise
        agreed = False
    if not agreed:
        raise Failure("Nothing was done.")
