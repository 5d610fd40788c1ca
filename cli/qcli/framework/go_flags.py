"""Commands that parse options in the way of Go's flag package."""

import itertools
import re
from collections.abc import Sequence

import click

from .command import DocumentedCommand
from .options import GroupedOption

REPEATED = "qcli.repeated"
"""Key in a context's `meta`: the notes that a `GoFlagsCommand` logs about repeated options."""

_GO_FLAG = re.compile(r"--?(?P<name>[^-=][^=]*)(?:=(?P<value>.*))?", re.DOTALL)


class GoFlagsCommand(DocumentedCommand):
    """A command that also parses options in the way of Go's flag package.

    Options may have one dash or two, also those of one letter. An option with an optional value, such as `--snappy`,
    takes the value after `=` only, `--snappy=false`; the next word is not its value.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Convert the arguments to click's syntax and parse them."""
        options = self._options_by_name(ctx)
        for flag, word in itertools.pairwise(args):
            param = options.get(flag.lstrip("-")) if flag.startswith("-") else None
            if not isinstance(param, GroupedOption) or not param.alone or word.startswith("-"):
                continue
            if ignored := getattr(param, "ignored", None):
                raise click.UsageError(f"{flag} has no effect, {ignored}: leave '{word}' out.", ctx)
            if self._may_be_value(ctx, param, word):
                raise click.UsageError(f"Write {flag}={word}: the value must follow '='.", ctx)
        return super().parse_args(ctx, self.in_click_syntax(ctx, args))

    def report_repeated(self, ctx: click.Context, text: str) -> None:
        """Record a note for the log: as in Go, the last value is used, without an error."""
        ctx.meta.setdefault(REPEATED, []).append(text)

    def in_click_syntax(self, ctx: click.Context, args: Sequence[str]) -> list[str]:
        """Return arguments with two dashes before each name, and values for options that are given without one."""
        options = self._options_by_name(ctx)
        written: list[str] = []
        words = iter(args)
        for word in words:
            if word == "--":
                return [*written, word, *words]
            found = _GO_FLAG.fullmatch(word)
            param = options.get(found["name"]) if found else None
            if found is None or param is None:
                # click reports the error; with one dash it would name only the first letter of -foo.
                written.append(f"-{word}" if found and word[1] != "-" and len(found["name"]) > 1 else word)
                continue
            name, value = found["name"], found["value"]
            written.append(f"-{name}" if len(name) == 1 else f"--{name}")
            if value is None:
                value = getattr(param, "alone", None)
            if value is not None:
                written[-1:] = [written[-1], value] if len(name) == 1 else [f"{written[-1]}={value}"]
            elif not param.is_flag:
                written += itertools.islice(words, 1)  # not checked: a value may begin with a dash
        return written

    def _may_be_value(self, ctx: click.Context, param: click.Option, word: str) -> bool:
        """Return whether a user who wrote this word after the option meant its value.

        A command with arguments may have an argument there: only a word that completion offers is a value then.
        """
        if any(isinstance(other, click.Argument) for other in self.params):
            return isinstance(param.type, click.Choice) and word.lower() in param.type.choices
        try:
            param.type_cast_value(ctx, word)
        except click.BadParameter:
            return False
        return True

    def _options_by_name(self, ctx: click.Context) -> dict[str, click.Option]:
        """Return the options by their names without the dashes."""
        return {
            name.lstrip("-"): param
            for param in self.get_params(ctx)
            if isinstance(param, click.Option)
            for name in param.opts
        }
