"""Checks whether a discovery service could start, without starting it."""

from functools import partial

from ...server.startup_checks import (
    Check,
    check_auth_file,
    check_data_folder,
    check_different,
    check_listen_address,
    check_tls,
    check_written_file,
    problems_of,
)
from .names_file import FILE_NAME, read_names
from .options import LookupdOptions


def startup_problems(options: LookupdOptions) -> list[str]:
    """Return why a service could not start with these options; empty: it could.

    Files are read, and not changed. Whether a port is free is not checked.
    """
    listeners = [("--tcp-address", options.tcp_address), ("--http-address", options.http_address)]
    checks: list[Check] = [
        partial(check_tls, options.tls),
        partial(check_auth_file, options.auth_file, options.tls),
        *(partial(check_listen_address, flag, address) for flag, address in listeners),
        partial(check_different, listeners),
        partial(check_written_file, "--audit-log", options.audit_log),
    ]
    if options.data_path is not None:
        checks.append(partial(check_data_folder, options.data_path))
        if options.data_path.is_dir():
            checks.append(partial(read_names, options.data_path / FILE_NAME))
    return problems_of(checks)
