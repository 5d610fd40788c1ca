"""Asks the user before messages are deleted."""

import sys

import click

from ..framework.errors import Failure
from ..framework.output import is_terminal, print_diagnostic


def confirm(question: str, what_it_does: str) -> None:
    """Ask the user, and return if they agree; `what_it_does` begins the error if there is no terminal to ask on.

    Raises:
        click.UsageError: Standard input is no terminal.
        click.Abort: Interrupted.
        Failure: The user did not agree; the end of the input, Ctrl-D, is a no.
    """
    if not is_terminal(sys.stdin):
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
