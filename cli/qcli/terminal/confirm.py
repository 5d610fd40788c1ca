"""Asks the user before messages may be lost."""

import sys
from collections.abc import Callable

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
    if _answer(what_it_does, lambda: click.confirm(question, err=True)) is not True:
        raise Failure("Nothing was done.")


def confirm_by_typing(word: str, question: str, what_it_does: str) -> None:
    """Ask the user to type a word, and return if they do; for what cannot be undone. Raises as `confirm`."""
    typed = _answer(what_it_does, lambda: click.prompt(question, default="", show_default=False, err=True))
    if typed != word:
        raise Failure("Nothing was done.")


def _answer(what_it_does: str, ask: Callable[[], bool | str]) -> bool | str | None:
    """Return the answer of the user; None: the end of the input."""
    if not is_terminal(sys.stdin):
        raise click.UsageError(f"{what_it_does}, and standard input is not a terminal: confirm with --yes.")
    try:
        return ask()
    except click.Abort as error:
        print_diagnostic("")  # end the line of the question
        if not isinstance(error.__context__, EOFError):
            raise
        return None
