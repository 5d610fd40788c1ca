"""Completion in bash, zsh and fish: answers the scripts in `completions/`.

The scripts run `qcli` with `_QCLI_COMPLETE=<shell>_complete` and read one candidate per line (see
`qcli.generate.scripts`). `QCLI_CURRENT` is the word to complete, `QCLI_WORDS` the words before it, one per
line. bash splits words at `=` and `:` too, so it sends the line up to the cursor in `QCLI_LINE`, and
the separators in `QCLI_WORDBREAKS`.
"""

import os

import click
from click.shell_completion import (
    CompletionItem,
    ShellComplete,
    add_completion_class,
    shell_complete,
    split_arg_string,
)

from .go_flags import GoFlagsCommand

COMPLETE_VARIABLE = "_QCLI_COMPLETE"
SHELLS = ("bash", "zsh", "fish")


class LineComplete(ShellComplete):
    """Answers the scripts of `qcli.generate`."""

    source_template = "%(prog_name)s"

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the complete words after the program's name, and the word to complete."""
        line = os.environ.get("QCLI_LINE")
        if line is None:
            words = os.environ.get("QCLI_WORDS", "").split("\n")
            return words[1:], os.environ.get("QCLI_CURRENT", "")
        words = split_arg_string(line) + ([""] if line[-1:].isspace() else [])
        return words[1:-1], words[-1]

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem]:
        """Return candidates in the form that the shell inserts, also in `--option=value`."""
        option, equals, _ = incomplete.partition("=")
        prefix = f"{option}=" if equals and option.startswith("--") else ""
        breaks = set(os.environ.get("QCLI_WORDBREAKS", "")) & set("=:")
        # bash replaces only the text after the last separator
        cut = 1 + max((incomplete.rfind(sign) for sign in breaks), default=-1)
        items = super().get_completions(self._in_click_syntax(args), incomplete)
        for item in items:
            item.value = (prefix + item.value)[cut:]
        return items

    def _in_click_syntax(self, args: list[str]) -> list[str]:
        """Return the words before in click's syntax, so that click finds the option whose value is completed."""
        assert isinstance(self.cli, click.Group)
        ctx = click.Context(self.cli, resilient_parsing=True)
        command = self.cli.get_command(ctx, args[0]) if args else None
        if isinstance(command, GoFlagsCommand):
            return [args[0], *command.in_click_syntax(click.Context(command, parent=ctx), args[1:])]
        return args

    def format_completion(self, item: CompletionItem) -> str:
        return f"{item.type}\t{item.value}\t{' '.join((item.help or '').split())}"


def answer_shell(command: click.Command, instruction: str) -> int:
    """Answer a completion script, whose question is in the environment, and return the exit code."""
    # Replace click's classes, because the format belongs to the scripts of `qcli.generate`.
    for shell in SHELLS:
        add_completion_class(LineComplete, shell)
    return shell_complete(command, {}, "qcli", COMPLETE_VARIABLE, instruction)
