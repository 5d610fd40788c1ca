"""Checks the files and addresses of a console without starting it."""

from functools import partial

from ..client.connection.tls import TLSFilesError
from ..protocol.errors import StartupError
from ..server.startup_checks import check_listen_address, check_written_file, problems_of
from ..tls.context import server_context
from ..tls.settings import TLSSettings
from .access.access import read_policy
from .access.proxies import Proxies
from .access.sessions import check_session_key
from .messages.bodies import read_readers
from .oidc.login import check_provider
from .oidc.provider import Provider
from .options import ConsoleOptions


def startup_problems(options: ConsoleOptions, *others: ConsoleOptions) -> list[str]:
    """Return what would keep a console from starting; `others` are the configurations of its further fleets."""

    def check_tls(of: ConsoleOptions) -> None:
        try:
            of.tls.context()
        except TLSFilesError as exc:
            raise StartupError(str(exc)) from exc

    return [
        *problems_of(
            [
                *(partial(check_tls, each) for each in (options, *others)),
                partial(server_context, TLSSettings(options.https_cert, options.https_key), "https"),
            ]
        ),
        *file_problems(options),
        *problems_of([partial(check_listen_address, "--http-address", options.http_address)]),
    ]


def file_problems(options: ConsoleOptions, *, asks_provider: bool = True) -> list[str]:
    """Return what is wrong with the files of a console, its proxies and its provider.

    Args:
        asks_provider: Wait for an answer of the provider. Without it, a console can start, and ask later.
    """

    def check_oidc() -> None:
        if options.oidc is not None:
            check = check_provider if asks_provider else Provider
            check(
                options.oidc,
                connect_timeout_s=options.connect_timeout_ms / 1000,
                request_timeout_s=options.request_timeout_ms / 1000,
            )

    return problems_of(
        [
            partial(read_policy, options.auth_file),
            partial(check_session_key, options.session_key_file),
            partial(read_readers, options.bodies_file),
            partial(check_written_file, "--audit-log", options.audit_log),
            partial(Proxies, options.trusted_proxies, options.acl_http_header, options.admin_users),
            check_oidc,
        ]
    )
