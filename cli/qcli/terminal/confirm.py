"""Asks the user before messages are deleted."""

import sys

import click

from ..framework.errors import ExitCode, Failure
from ..framework.output import is_terminal, print_diagnostic

UNCONFIRMED = {
    ExitCode.USAGE: f"{ExitCode.USAGE.meaning} Or the command must be confirmed, standard input is not a terminal, and "
    "--yes is missing."
}
"""The meaning of an exit code for the commands that ask."""


def confirm(question: str, what_it_does: str) -> None:
    """Ask the user, and return if they confirm; `what_it_does` begins the error if there is no terminal.

    Raises:
        click.UsageError: Standard input is not a terminal.
        click.Abort: Interrupted.
        Failure: The user did not confirm; the end of the input, Ctrl-D, means no.
    """
    if not is_terminal(sys.stdin):
        raise click.UsageError(f"{what_it_does}, and standard input is not a terminal: confirm with --yes.")
    try:
        agreed = click.confirm(question, err=True)
    except click.Abort as error:
        print_diagnostic("")  # end the line of the question
        if not isinstance(error.__context__, EOFError):
            raise
        agreed = False
    if not agreed:
        raise Failure("Nothing was done.")
