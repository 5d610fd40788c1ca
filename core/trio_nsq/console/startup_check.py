"""Checks the files and addresses of a console without starting it."""

from functools import partial

from ..client.connection.tls import TLSFilesError
from ..listening import StartupError
from ..startup_checks import check_listen_address, problems_of
from .options import ConsoleOptions


def startup_problems(options: ConsoleOptions) -> list[str]:
    """Return what would keep a console from starting."""

    def check_tls() -> None:
        try:
            options.tls.context()
        except TLSFilesError as exc:
            raise StartupError(str(exc)) from exc

    return problems_of([check_tls, partial(check_listen_address, "--http-address", options.http_address)])
