"""Commands that take their options as Go's flag package does."""

import itertools
import re
from collections.abc import Sequence

import click

from .command import DocumentedCommand
from .options import GroupedOption

REPEATED = "qcli.repeated"
"""In a context's `meta`: what a `GoFlagsCommand` is to log about options that were given several times."""

_GO_FLAG = re.compile(r"--?(?P<name>[^-=][^=]*)(?:=(?P<value>.*))?", re.DOTALL)


class GoFlagsCommand(DocumentedCommand):
    """A command that also takes its options as Go's flag package does.

    One dash is as good as two. An option whose value may be left out, such as `--snappy`, takes one behind `=` only,
    `--snappy=false`: the word after it is another.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse them in click's way, after writing them so."""
        options = self._options_by_name(ctx)
        for flag, word in itertools.pairwise(args):
            param = options.get(flag.lstrip("-")) if flag.startswith("-") else None
            if not isinstance(param, GroupedOption) or not param.alone or word.startswith("-"):
                continue
            if ignored := getattr(param, "ignored", None):
                raise click.UsageError(f"{flag} has no effect here, {ignored}: leave '{word}' out.", ctx)
            if isinstance(param.type, click.Choice) and word.lower() in param.type.choices:
                raise click.UsageError(f"Write {flag}={word}: the value belongs behind '='.", ctx)
        return super().parse_args(ctx, self.in_click_syntax(ctx, args))

    def report_repeated(self, ctx: click.Context, text: str) -> None:
        """Remember it for the log: in Go the last value counts, without an error."""
        ctx.meta.setdefault(REPEATED, []).append(text)

    def in_click_syntax(self, ctx: click.Context, args: Sequence[str]) -> list[str]:
        """Arguments with two dashes before each name, and a value for each option that may be left without."""
        options = self._options_by_name(ctx)
        written: list[str] = []
        words = iter(args)
        for word in words:
            if word == "--":
                return [*written, word, *words]
            found = _GO_FLAG.fullmatch(word)
            param = options.get(found["name"]) if found else None
            if found is None or param is None:
                # click says what is wrong with it, and of the letters of -foo it would name the first only.
                written.append(f"-{word}" if found and word[1] != "-" and len(found["name"]) > 1 else word)
                continue
            value = found["value"] if found["value"] is not None else getattr(param, "alone", None)
            if value is not None:
                written.append(f"--{found['name']}={value}")
            else:
                # The value is not looked at: it may begin with a dash.
                written += [f"--{found['name']}", *itertools.islice(words, 1)]
        return written

    def _options_by_name(self, ctx: click.Context) -> dict[str, click.Option]:
        """Those with long names, without the dashes."""
        return {
            name.removeprefix("--"): param
            for param in self.get_params(ctx)
            if isinstance(param, click.Option)
            for name in param.opts
            if name.startswith("--")
        }
