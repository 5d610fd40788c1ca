"""Which context a command uses, and how its values become the defaults of the command's options."""

import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from ..framework.errors import Failure
from ..framework.options import DEFAULTS_ORIGIN, IGNORED_VARIABLES, GroupedOption
from .context import ADDRESSES, KEYS, SECRETS, Context, option_of
from .store import read_contexts, writable_by_others

CONTEXT_OPTION = "--context"
CONTEXT_VARIABLE = "QCLI_CONTEXT"
BY_USE = "'qcli context use'"
_CHOSEN_CONTEXT = "qcli.context"
_REPLACED = "qcli.context.replaced"
_NAMED_BEFORE = "qcli.context.before"
_SECTION = "Which broker"
_PARAMETER = "context_name"
_ADDRESS_OPTIONS = {option_of(key): key for key in ADDRESSES}
_OPTIONS = {option_of(key): key for key in KEYS} | {"--auth-secret": "auth_secret"}


@dataclass(frozen=True, slots=True)
class ChosenContext:
    """The context that a command uses.

    Attributes:
        origin: Where its name is from: `--context`, `QCLI_CONTEXT` or `BY_USE`.
    """

    context: Context
    origin: str


def chosen_context(ctx: click.Context) -> ChosenContext | None:
    """Return the context that a command uses; None: no context."""
    found: ChosenContext | None = ctx.meta.get(_CHOSEN_CONTEXT)
    return found


def note_of_unused_context(ctx: click.Context) -> str:
    """Return a note that a context is not used because the command has another address; "": this is not so."""
    if _REPLACED not in ctx.meta:
        return ""
    name, replaced_by = ctx.meta[_REPLACED]
    with suppress(Failure):
        name = name or read_contexts().current
    return f"Note: the context {name} is not used, because {replaced_by} is given." if name else ""


def complete_context(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    try:
        names = read_contexts().tables
    except Failure:
        return []
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


class ContextOption(GroupedOption):
    """`--context`: makes the values of a context the defaults of the command's other options.

    A context describes one cluster, so its addresses are used together or not at all:

    - If `--context` is typed, no variables are read for addresses and connection options. Typed options override the
      context's, and a typed address replaces all addresses of the context.
    - Otherwise an address that is typed or in a variable means another cluster: then the context is not used, and its
      secret does not go there.
    """

    def handle_parse_result(
        self, ctx: click.Context, opts: Mapping[str, Any], args: list[str]
    ) -> tuple[Any, list[str]]:
        """Process this option before the others, whose names are in `opts` if they are typed."""
        value, args = super().handle_parse_result(ctx, opts, args)
        name = value if isinstance(value, str) else None  # not click's sentinel
        typed = [
            (flag, param)
            for param in ctx.command.params
            if isinstance(param, click.Option) and param.name in opts
            for flag in param.opts
            if flag in _ADDRESS_OPTIONS
        ]
        if ctx.get_parameter_source(_PARAMETER) is ParameterSource.COMMANDLINE or _NAMED_BEFORE in ctx.meta:
            # A hidden address option is accepted, and not used.
            typed = [each for each in typed if not each[1].hidden]
        address = typed[0][0] if typed else ""
        # While the shell completes, an error must not disturb the prompt.
        with suppress(*(Failure, click.UsageError) if ctx.resilient_parsing else ()):
            self._choose(ctx, name, address)
        return value, args

    def _choose(self, ctx: click.Context, name: str | None, typed_address: str) -> None:
        """Choose a context and use it.

        Args:
            name: The value of this option, or of its variable.
            typed_address: An address option that is typed; "": none is.

        Raises UsageError: there is no such context; Failure: the file is wrong.
        """
        source = ctx.get_parameter_source(_PARAMETER)
        typed: tuple[str | None, click.Parameter] | None = (
            (name, self) if source is ParameterSource.COMMANDLINE else ctx.meta.get(_NAMED_BEFORE)
        )
        if typed is not None:
            name, param = typed
            if name:
                ctx.meta[IGNORED_VARIABLES] = frozenset(_parameters(ctx))
                self._use(ctx, name, CONTEXT_OPTION, param, keeps_addresses=not typed_address)
            return
        if replaced_by := typed_address or address_variable():
            ctx.meta[_REPLACED] = name, replaced_by  # not even the file is read
        elif name:
            self._use(ctx, name, CONTEXT_VARIABLE, self)
        elif name := read_contexts().current:
            self._use(ctx, name, BY_USE, self)

    def _use(
        self,
        ctx: click.Context,
        name: str,
        origin: str,
        param: click.Parameter,
        *,
        keeps_addresses: bool = True,
    ) -> None:
        contexts = read_contexts()
        context = contexts.get(name)
        if context is None:
            error = contexts.unknown(name, "To choose one: qcli context use NAME" if origin == BY_USE else "")
            if origin == BY_USE:
                raise Failure(f"{contexts.current_place()}: {error.message}", error.exit_code)
            raise click.BadParameter(error.message, ctx, param)
        if "auth_secret_command" in context.values and writable_by_others(contexts.path):
            raise Failure(
                f"{contexts.path}: other users can change this file or its folder, and with it the auth_secret_command "
                f"of the context {context.name}. Make both yours (chown), and: "
                f"chmod go-w {contexts.path.parent} {contexts.path}"
            )
        ctx.meta[_CHOSEN_CONTEXT] = ChosenContext(context, origin)
        ctx.meta[DEFAULTS_ORIGIN] = f"context {context.name}"
        defaults: dict[str, Any] = dict(ctx.default_map or {})
        for name, (key, param) in _parameters(ctx).items():
            if key in ADDRESSES:
                # Also without a value: the default must not join other addresses.
                addresses = context.values.get(key, ()) if keeps_addresses else ()
                defaults[name] = addresses if param.multiple else ",".join(addresses) or None
            elif key in context.values and key not in SECRETS:
                defaults[name] = context.values[key]
        ctx.default_map = defaults


def _parameters(ctx: click.Context) -> dict[str, tuple[str, click.Option]]:
    """Return the options of a command that a context may set: its keys and options by the parameter's name."""
    return {
        param.name: (_OPTIONS[flag], param)
        for param in ctx.command.params
        if isinstance(param, click.Option) and param.name
        for flag in param.opts
        if flag in _OPTIONS
    }


def require_address(
    addresses: Collection[str] | str | None, *options: str, ctx: click.Context | None = None
) -> None:
    """Raises UsageError: the command has no address, because its context has none of these kinds.

    Args:
        addresses: The values of the options together.
        options: Address options, each of which would do.
        ctx: The command's context; None: the current one.
    """
    if addresses:
        return
    ctx = ctx or click.get_current_context()
    chosen = chosen_context(ctx)
    assert chosen is not None, "without a context, there are defaults"
    name, wanted = chosen.context.name, " or ".join(options)
    if any(chosen.context.values.get(_OPTIONS[flag]) for flag in options):
        raise click.UsageError(
            f"The typed address replaces those of the context {name}: give {wanted}, too.", ctx
        )
    raise click.UsageError(
        f"The context {name} has no address for this command: {wanted}. Add one: qcli context save {name} "
        f"{options[0]} HOST:PORT",
        ctx,
    )


def address_variable() -> str:
    """Return the first environment variable that sets an address; "": there is none."""
    return next(filter(os.environ.get, (f"QCLI_{key.upper()}" for key in ADDRESSES)), "")


def name_context(ctx: click.Context, param: click.Parameter, name: str | None) -> str | None:
    """Use this context, as if it were typed after `--context`: a callback for a parameter that comes before."""
    if name is not None:
        ctx.meta[_NAMED_BEFORE] = name, param
    return name


context_option = click.option(
    "--context",
    _PARAMETER,
    cls=ContextOption,
    section=_SECTION,
    is_eager=True,
    expose_value=False,
    envvar=CONTEXT_VARIABLE,
    metavar="NAME",
    shell_complete=complete_context,
    help="Use this context: see 'qcli context'.",
)
"""`--context` of a command that has address options or connection options."""

root_context_option = click.option(
    "--context",
    _PARAMETER,
    cls=GroupedOption,
    callback=name_context,
    metavar="NAME",
    shell_complete=complete_context,
    help="Use this context: see 'qcli context'.",
)
"""`--context` before the command's name, with the same effect."""
