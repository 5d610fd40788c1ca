"""The brokers of a command: one, several, or those that discovery services list. Requests go to all at once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import click
from click.core import ParameterSource

from ..contexts.choice import chosen_context, require_address
from ..framework.errors import ExitCode, Failure
from ..framework.options import all_of
from ..framework.output import print_diagnostic
from ..framework.positions import refuse_sequence
from .address_options import (
    HTTP_OPTION,
    http_addresses,
    lookupd_addresses,
    unused_tcp_addresses,
)
from .at_once import at_once, in_context
from .connection_options import http_connection, refuse_plain_http
from .refusals import NotFound, Unsupported, listed, missing

if TYPE_CHECKING:
    from trio_nsq.api.lookupd import Node

_T = TypeVar("_T")
_F = TypeVar("_F", bound=Callable[..., Any])
_RANK = (
    ParameterSource.COMMANDLINE,
    ParameterSource.ENVIRONMENT,
    ParameterSource.DEFAULT_MAP,
    ParameterSource.DEFAULT,
)
"""Where a value may come from; the first one with an address decides."""
MAX_WARNINGS = 10
"""Of the same kind: a discovery service may list any number of hosts."""
MAX_FAILURES = 100
"""Named in one error."""
_MAX_SHOWN = 255


@dataclass(frozen=True)
class Answers(Generic[_T]):
    """The results of all brokers that answered, and the failures of the others, by address.

    Attributes:
        lacking: The brokers that do not have the topic or channel, while another broker does.
    """

    results: dict[str, _T]
    failures: dict[str, Failure]
    lacking: dict[str, NotFound]

    def check(self) -> None:
        """Raise the failures, after the results have been written.

        Raises Failure: a broker failed. The code is `PARTIAL` if another one did not.
        """
        if self.failures:
            raise combined(self.failures.values(), partial=bool(self.results))


class Brokers:
    """The brokers of a command.

    Args:
        given: HTTP addresses.
        lookupds: Discovery services; the brokers they list belong to the command, too.
        allowed_hosts: Leave out listed brokers on other hosts; if empty, allow all.
        quiet: Print no warnings.

    Attributes:
        given: The addresses that were given, without those that discovery services list.
    """

    def __init__(
        self,
        given: Sequence[str],
        lookupds: Sequence[str] = (),
        allowed_hosts: Iterable[str] = (),
        *,
        quiet: bool = False,
    ) -> None:
        self.given = tuple(given)
        self.lookupds = tuple(lookupds)
        self._allowed_hosts = tuple(allowed_hosts)
        self._quiet = quiet

    @functools.cached_property
    def addresses(self) -> tuple[str, ...]:
        """The HTTP addresses, one for each broker. At the first use this asks the discovery services, all at once.

        A service that does not answer is reported on standard error; another one knows the same brokers.

        Raises Failure: no service answers, or none lists a broker.
        """
        listed = self._listed() if self.lookupds else []
        return distinct_brokers([*self.given, *listed], self.check_listed)

    def again(self) -> Brokers:
        """Return the same brokers, for which the discovery services will be asked again, without warnings."""
        return Brokers(self.given, self.lookupds, self._allowed_hosts, quiet=True)

    @property
    def is_fleet(self) -> bool:
        """Whether there may be several brokers, so that output names the broker."""
        return bool(self.lookupds) or len(self.given) > 1

    def merge(self, answers: Answers[list[dict[str, Any]]]) -> list[dict[str, Any]]:
        """Return the records of all brokers, one broker after the other, as `records` names them."""
        return [record for each, found in answers.results.items() for record in self.records(found, each)]

    @property
    def names(self) -> str:
        """The addresses, for a question to the user."""
        return listed(self.addresses, "and")

    def suffix(self, address: str) -> str:
        """Return the end of a report about one of several brokers; empty if there is only one."""
        return f" on {address}" if self.is_fleet else ""

    def records(self, records: Iterable[Mapping[str, Any]], address: str) -> list[dict[str, Any]]:
        """Return records with the broker's address as `broker`; unchanged if there is only one broker."""
        return (
            [{"broker": address, **record} for record in records]
            if self.is_fleet
            else list(map(dict, records))
        )

    def nodes(self) -> list[Node]:
        """Return the brokers that the discovery services list, on allowed hosts.

        Raises Failure: no service answers.
        """
        from .lookupd_client import LookupdClient

        answers = at_once(self.lookupds, lambda address: LookupdClient(address).nodes())
        failures = [answer for answer in answers.values() if isinstance(answer, Failure)]
        if len(failures) == len(answers):
            raise combined(failures, partial=False)
        for failure in failures:
            self._warn(failure.brief)
        nodes = [node for answer in answers.values() if not isinstance(answer, Failure) for node in answer]
        return self.allowed(nodes)

    def none_listed(self, option: str) -> Failure:
        """Return the failure if the discovery services list no usable broker; `option` names a broker."""
        return Failure(
            f"No broker is registered at {' or '.join(self.lookupds)}. Start one with 'qcli serve "
            f"--lookupd-tcp-address HOST:4160', or name a broker: {option}.",
            ExitCode.UNREACHABLE,
        )

    def _listed(self) -> list[str]:
        from .https_ports import addresses_with_https

        found = []
        for node in self.nodes():
            if node.http_address is None:
                self._warn(f"the broker {node.tcp_address} has no HTTP port; left out.")
            else:
                found.append(node.http_address)
        if not found and not self.given:
            raise self.none_listed(HTTP_OPTION)
        return sorted(addresses_with_https(list(dict.fromkeys(found))).values())

    def allowed(self, nodes: Iterable[Node]) -> list[Node]:
        """Return the brokers on allowed hosts, and warn about the others."""
        from trio_nsq.lookup.hosts import host_filter

        is_allowed = host_filter(self._allowed_hosts)
        found, foreign, unusable = [], set[str](), set[str]()
        for node in nodes:
            if not node.has_usable_host:
                unusable.add(node.broadcast_address)
            elif is_allowed(node.broadcast_address):
                found.append(node)
            else:
                foreign.add(node.broadcast_address)
        self._warn_left_out(foreign, "is not among the hosts of --lookupd-allowed-host")
        self._warn_left_out(unusable, "is not a host, but a broker is registered with it")
        return found

    def _warn_left_out(self, hosts: set[str], why: str) -> None:
        for host in sorted(hosts)[:MAX_WARNINGS]:
            self._warn(f"{repr(host)[:_MAX_SHOWN]} {why}; left out.")
        if len(hosts) > MAX_WARNINGS:
            self._warn(f"{len(hosts) - MAX_WARNINGS} more such hosts are left out.")

    def _warn(self, text: str) -> None:
        if not self._quiet:
            print_diagnostic(f"Warning: {text}")

    def named(self, address: str, failure: Failure) -> Failure:
        """Return a broker's failure with its address, if there are several brokers and the message lacks it."""
        if not self.is_fleet or address in failure.message:
            return failure
        return Failure(
            f"{address}: {failure.message}", failure.exit_code, brief=f"{address}: {failure.brief}"
        )

    def check_listed(self, address: str) -> None:
        """Raise Failure if a discovery service lists the address, and the options for TLS exclude plain HTTP."""
        if address in self.given:
            return
        try:
            refuse_plain_http(address)
        except click.UsageError as error:
            text = f"The broker at {address} was not asked: it does not tell a port for HTTPS, and TLS is asked for."
            raise Failure(f"{text} {error.message}", brief=text) from error

    def ask(self, act: Callable[[str], _T], *, in_turn: bool = False) -> Answers[_T]:
        """Call `act` with the address of every broker, and collect results and failures; raises none of them.

        With several brokers, `act` runs in threads, for all of them at once, unless they are asked `in_turn`.
        """
        results: dict[str, _T] = {}
        failures: dict[str, Failure] = {}
        lacking: dict[str, NotFound] = {}
        for address in self.given:
            refuse_plain_http(address)

        def asked(address: str) -> _T:
            self.check_listed(address)
            return act(address)

        for address, answer in at_once(self.addresses, asked, at_most=1 if in_turn else None).items():
            if isinstance(answer, NotFound):
                lacking[address] = answer
            elif isinstance(answer, Failure):
                failures[address] = self.named(address, answer)
            else:
                results[address] = answer
        return Answers(results, failures, lacking)

    def read(self, act: Callable[[str], _T]) -> Answers[_T]:
        """Call `act` as `ask` does, for results that can be shown without the other brokers'.

        Brokers without the topic or channel do not matter if another one has it. A broker without such requests, as an
        nsqd, is noted. Call `Answers.check` after the output.

        Raises Failure: no broker has a result.
        """
        answers = self.ask(act)
        if not answers.results:
            raise self._why_none(answers)
        for failure in answers.failures.values():
            if isinstance(failure, Unsupported) and not self._quiet:
                print_diagnostic(f"Note: {failure.brief}")
        failures = {
            address: each for address, each in answers.failures.items() if not isinstance(each, Unsupported)
        }
        return replace(answers, failures=failures)

    def change(
        self, act: Callable[[str], _T], report: Callable[[str, _T], None], *, in_turn: bool = False
    ) -> None:
        """Make a change on every broker, and report each in the order of the addresses.

        A broker without the topic or channel is noted if another one has it.

        Args:
            act: Makes the change; called as by `ask`.
            in_turn: Change one broker after the other.
            report: Writes the result of a broker. May raise Failure: the change of this broker is incomplete.

        Raises:
            Failure: A broker failed; the message names it. The code is `PARTIAL` if a change was made.
            click.UsageError: An address is not allowed; nothing was changed.
        """
        answers = self.ask(act, in_turn=in_turn)
        failures = dict(answers.failures)
        done = 0
        for address, result in answers.results.items():
            try:
                report(address, result)
                done += 1
            except Failure as error:
                failures[address] = self.named(address, error)
        if not answers.results:
            raise self._why_none(answers)
        for failure in answers.lacking.values():
            print_diagnostic(f"Note: {failure.brief}")
        if failures:
            raise combined(failures.values(), partial=bool(done))

    def _why_none(self, answers: Answers[Any]) -> Failure:
        if answers.failures:
            return combined([*answers.failures.values(), *answers.lacking.values()], partial=False)
        lacking = next(iter(answers.lacking.values()))
        if len(self.addresses) == 1 or lacking.wanted is None:
            return lacking
        return missing(lacking.wanted, *self.addresses, creation=lacking.creation)


def distinct_brokers(
    addresses: Iterable[str], check: Callable[[str], None] = lambda address: None
) -> tuple[str, ...]:
    """Return one HTTP address for each broker, the first one: several may reach the same.

    Args:
        check: Raises Failure if an address must not be asked.
    """
    from trio_nsq.fleet.identity import BrokerIdentity, first_addresses

    from .admin_client import AdminClient

    def identify(address: str) -> Hashable | None:
        try:
            check(address)
            return BrokerIdentity.of(AdminClient(address).info())
        except (Failure, click.UsageError):  # whatever needs the broker reports it
            return None

    distinct = tuple(dict.fromkeys(addresses))
    if len(distinct) < 2:
        return distinct
    return tuple(dict.fromkeys(first_addresses(distinct, in_context(identify)).values()))


def combined(failures: Iterable[Failure], *, partial: bool) -> Failure:
    """Return one failure for those of several servers; at least one.

    Args:
        partial: Whether another server did what was asked.
    """
    every = list({failure.message: failure for failure in failures}.values())  # a server may fail twice
    codes = {failure.exit_code for failure in every}
    if partial or ExitCode.PARTIAL in codes:
        code = ExitCode.PARTIAL
    else:
        code = codes.pop() if len(codes) == 1 else ExitCode.FAILURE
    if len(every) == 1:
        return Failure(every[0].message, code, brief=every[0].brief)
    shown = [failure.brief for failure in every[:MAX_FAILURES]]
    if len(every) > len(shown):
        shown.append(f"and {len(every) - len(shown)} more.")
    return Failure("\n  ".join([f"{len(every)} failures:", *shown]), code)


def chosen(
    ctx: click.Context, http_name: str = "nsqd_http_addresses", lookupd_name: str = "lookupd_addresses"
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the brokers and the discovery services of a command line, as two tuples of addresses.

    The command line wins over the environment, this over a context, and this over the default, for both kinds together:
    an address of one kind on the command line replaces those of both kinds elsewhere.

    Args:
        http_name, lookupd_name: The parameters with the addresses of brokers and of discovery services.

    Raises UsageError: the context has no such address.
    """
    names = (http_name, lookupd_name)
    for source in _RANK:
        values = [
            tuple(ctx.params.get(name) or ()) if ctx.get_parameter_source(name) is source else ()
            for name in names
        ]
        if any(values):
            return values[0], values[1]
    if chosen_context(ctx):
        flags = [param.opts[0] for name in names for param in ctx.command.params if param.name == name]
        require_address((), *flags, ctx=ctx)
    return (), ()


def brokers_with_logs(allowed_hosts: Iterable[str], *positions: str | None) -> Brokers:
    """Return the brokers of the current command, to read their logs between positions.

    Raises UsageError: a position is a sequence, and there are several brokers.
    """
    brokers = Brokers(*chosen(click.get_current_context()), allowed_hosts)
    for position in positions:
        refuse_sequence(position, brokers.addresses)
    return brokers


def is_as_near(name: str, *others: str) -> bool:
    """Return whether a parameter has a value from the place that decides about these other ones, or a better place.

    Addresses of a context are of one cluster, so they say nothing about each other.
    """
    source = click.get_current_context().get_parameter_source
    ranks = [_RANK.index(source(each) or ParameterSource.DEFAULT) for each in (name, *others)]
    return ranks[0] < _RANK.index(ParameterSource.DEFAULT_MAP) and ranks[0] <= min(ranks[1:])


def _with_brokers(command: _F) -> _F:
    """Pass `brokers: Brokers` to a command's function instead of the parameters of the address options."""

    @functools.wraps(command)
    def run(*args: Any, **values: Any) -> Any:
        given, lookupds = chosen(click.get_current_context())
        for name in ("nsqd_http_addresses", "lookupd_addresses"):
            del values[name]
        hosts = values.pop("lookupd_allowed_hosts")
        return command(*args, brokers=Brokers(given, lookupds, hosts), **values)

    return run  # type: ignore[return-value]  # click calls it with the parameters of the options


_options = all_of(
    unused_tcp_addresses,
    http_addresses("Connect to the brokers at these HTTP addresses."),
    lookupd_addresses("Connect to all brokers that these nsqlookupd list."),
    http_connection,
)


def broker_http_options(command: _F) -> _F:
    """Add the addresses and connection options of a command that sends HTTP requests to one broker or several.

    The command's function gets them as `brokers: Brokers`.
    """
    return _options(_with_brokers(command))
