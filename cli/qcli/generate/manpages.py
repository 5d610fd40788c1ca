"""Generates the manual pages: one per command of `qcli`, with subcommands on the page of their group."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import click

from ..app import root
from ..framework.command import DocumentedCommand, sections, subcommands
from ..framework.errors import ExitCode

_NOTICE = r""".\" Written by 'python -m qcli.generate'; do not edit."""


def man_pages() -> dict[str, str]:
    """Return the pages by file name."""
    ctx = click.Context(root, info_name="qcli", **root.context_settings)
    pages = {f"qcli-{below.info_name}.1": _page(below, command) for below, command in subcommands(ctx)}
    return {"qcli.1": _root_page(ctx)} | pages


def _root_page(ctx: click.Context) -> str:
    lines = [*_head(ctx, root), ".SH COMMANDS"]
    for sub_ctx, command in subcommands(ctx):
        lines += [".TP", f".BR {_text(f'qcli-{sub_ctx.info_name}')} (1)", _text(_paragraphs(command)[0])]
    return _finish(ctx, root, lines)


def _page(ctx: click.Context, command: DocumentedCommand) -> str:
    lines = _head(ctx, command)
    below = list(subcommands(ctx))
    # Options that all subcommands share are explained once.
    shared = _shared_options(below)
    if below:
        lines.append(".SH COMMANDS")
    for sub_ctx, subcommand in below:
        lines += [f'.SS "{_text(_synopsis(sub_ctx, subcommand))}"', *_body(_paragraphs(subcommand))]
        for options in sections(sub_ctx, subcommand).values():
            lines += _options(each for each in options if _identity(each) not in shared)
        for note, text in (subcommand.notes | subcommand.details).items():
            lines += [".PP", f".B {_text(note)}", ".br", _text(text)]
        lines += _examples(subcommand.examples)
    if below:
        first_ctx, first = below[0]
        common = {
            title: [each for each in options if _identity(each) in shared]
            for title, options in sections(first_ctx, first).items()
        }
        lines += [".SH OPTIONS", "All of these commands take these options.", *_option_groups(common)]
    return _finish(ctx, command, lines)


def _head(ctx: click.Context, command: DocumentedCommand) -> list[str]:
    """Return the lines up to the description, and the options unless the command has subcommands."""
    title = ctx.command_path.replace(" ", "-")
    summary = _paragraphs(command)[0].rstrip(".")
    lines = [
        _NOTICE,
        f'.TH {_text(title.upper())} 1 "" "trio\\-nsq" "User Commands"',
        ".SH NAME",
        f"{_text(title)} \\- {_text(summary[0].lower() + summary[1:])}",
        ".SH SYNOPSIS",
        f".B {_text(ctx.command_path)}",
        _text(" ".join(_arguments(ctx, command))),
        ".SH DESCRIPTION",
        *_body(_paragraphs(command)),
    ]
    if ctx.parent is None or not isinstance(command, click.Group):
        lines += [".SH OPTIONS", *_option_groups(sections(ctx, command))]
    return lines


def _finish(ctx: click.Context, command: DocumentedCommand, lines: list[str]) -> str:
    """Append the sections at the end of every page, and return the page's text."""
    paragraphs = command.notes | command.details
    for title, text in paragraphs.items():
        lines += [f".SH {_text(title.upper())}", _text(text)]
    lines += [".SH EXAMPLES", *_examples(command.examples), ".SH EXIT STATUS"]
    for code, meaning in _exits(ctx, command).items():
        lines += [".TP", f".B {int(code)}", _text(meaning)]
    variables = {
        str(param.envvar): param
        for _, each in [(ctx, command), *subcommands(ctx)]
        for param in each.params
        if isinstance(param, click.Option) and param.envvar and not param.hidden
    }
    if "Environment" in paragraphs:
        variables = {}  # that paragraph covers all variables in one rule
    if variables:
        lines.append(".SH ENVIRONMENT")
    for variable, param in variables.items():
        lines += [
            ".TP",
            f".B {_text(variable)}",
            _text(f"The value of {param.opts[-1]}, if that option is not given."),
        ]
    lines += [".SH SEE ALSO", *_see_also(ctx)]
    return "\n".join(lines) + "\n"


def _exits(ctx: click.Context, command: DocumentedCommand) -> dict[ExitCode, str]:
    codes = dict(command.exits)
    for _, subcommand in subcommands(ctx) if ctx.parent else []:
        codes = {code: codes.get(code, meaning) for code, meaning in (subcommand.exits | codes).items()}
    return dict(sorted(codes.items()))


def _see_also(ctx: click.Context) -> Iterator[str]:
    top = ctx.find_root()
    names = ["qcli", *(f"qcli-{name}" for name in root.list_commands(top))]
    others = [name for name in names if name != ctx.command_path.replace(" ", "-")]
    for name in others:
        yield f".BR {_text(name)} (1)" + ("" if name == others[-1] else ",")


def _paragraphs(command: click.Command) -> list[str]:
    """Return the description, each paragraph in one line."""
    return [" ".join(paragraph.split()) for paragraph in (command.help or "").split("\n\n")]


def _body(paragraphs: Sequence[str]) -> Iterator[str]:
    for index, paragraph in enumerate(paragraphs):
        if index:
            yield ".PP"
        yield _text(paragraph)


def _synopsis(ctx: click.Context, command: DocumentedCommand) -> str:
    return " ".join([ctx.command_path, *_arguments(ctx, command)])


def _arguments(ctx: click.Context, command: DocumentedCommand) -> Iterator[str]:
    yield "[OPTION...]"
    if isinstance(command, click.Group):
        yield "COMMAND"
    for param in command.get_params(ctx):
        if isinstance(param, click.Argument):
            yield str(param.metavar)


def _option_groups(groups: dict[str, list[click.Option]]) -> Iterator[str]:
    for title, options in groups.items():
        if options:
            yield f'.SS "{_text(title)}"'
            yield from _options(options)


def _options(options: Iterable[click.Option]) -> Iterator[str]:
    for param in options:
        names = ", ".join(f"\\fB{_text(name)}\\fR" for name in _spelling(param))
        value = _metavar(param)
        yield ".TP"
        blank = "" if value.startswith("[=") else " "
        yield f"{names}{blank}\\fI{_text(value)}\\fR" if value else names
        yield _text(" ".join(_explanation(param)))


def _spelling(param: click.Option) -> tuple[str, ...]:
    """Return the names of an option, short ones first."""
    return tuple(sorted([*param.opts, *param.secondary_opts], key=lambda name: name.startswith("--")))


def _metavar(param: click.Option) -> str:
    if param.is_flag:
        return ""
    if param.metavar:
        return param.metavar
    assert isinstance(param.type, click.Choice), f"{param.name} needs a metavar"
    return "|".join(map(str, param.type.choices))


def _explanation(param: click.Option) -> Iterator[str]:
    if "--help" in param.opts:
        yield "Show a help page and exit."  # click's own text may change with its version
        return
    yield param.help or ""
    if isinstance(param.show_default, str):
        yield f"Default: {param.show_default}."
    elif param.show_default and param.default is not None:
        default = "the current folder" if str(param.default) == "." else param.default
        values = (
            default if isinstance(default, (tuple, list)) else (default,)
        )  # the format of click's own help
        yield f"Default: {', '.join(map(str, values))}".strip() + "."


def _identity(param: click.Option) -> tuple[str, ...]:
    """Return a key that options with the same names, metavar and help share."""
    return (*_spelling(param), _metavar(param), param.help or "")


def _shared_options(subcommands: Sequence[tuple[click.Context, DocumentedCommand]]) -> set[tuple[str, ...]]:
    identities = [
        {_identity(param) for param in command.get_params(ctx) if isinstance(param, click.Option)}
        for ctx, command in subcommands
    ]
    return set.intersection(*identities) if identities else set()


def _examples(examples: Mapping[str, str]) -> Iterator[str]:
    for about, line in examples.items():
        yield from (".PP", _text(about[0].upper() + about[1:] + ":"))
        yield from (".PP", ".RS 4", ".EX", _text(line), ".EE", ".RE")


def _text(text: str) -> str:
    """Escape the characters that have a meaning in roff."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq").replace('"', "\\(dq")
    return f"\\&{escaped}" if escaped.startswith(".") else escaped
