"""Checks whether a broker could start, without starting it."""

from functools import partial
from pathlib import Path

from ..protocol.errors import StartupError
from ..server.startup_checks import (
    check_auth_file,
    check_data_folder,
    check_different,
    check_listen_address,
    check_tls,
    check_written_file,
    problems_of,
    secret_in,
)
from ..tls.client import client_context
from .options import BrokerOptions
from .session.auth_service import AuthClient
from .storage.data_folder import (
    BROKER_COPY_FILE,
    BROKER_FILE,
    MAX_BROKER_BYTES,
    decode_ids,
    refuse_member_folder,
    refuse_node_folder,
    refuse_nsqd_folder,
    refuse_unfinished_restore,
)


def startup_problems(options: BrokerOptions, *, is_member: bool = False, is_node: bool = False) -> list[str]:
    """Return why a broker, alone or as a member of a cluster, could not start with these options; empty: it could.

    With `is_node`, several processes share the data folder, each with a folder in it.

    Files and the archive are read, and not changed. Whether a port is free, and whether the logs of topics are intact,
    is not checked.
    """
    listeners = [("--tcp-address", options.tcp_address), ("--http-address", options.http_address)]
    if options.tls.cert is not None:
        listeners.append(("--https-address", options.https_address))
    restores = bool(options.restore_from) and not is_member
    return problems_of(
        [
            partial(check_tls, options.tls),
            partial(check_auth_file, options.auth_file, options.tls),
            partial(_check_auth_servers, options),
            partial(_check_lookup, options),
            *(partial(check_listen_address, flag, address) for flag, address in listeners),
            partial(check_different, listeners),
            partial(check_written_file, "--audit-log", options.audit_log),
            partial(check_data_folder, options.data_path),
            partial(_check_contents, options.data_path),
            *(() if is_member else (partial(refuse_member_folder, options.data_path),)),
            *(() if is_node else (partial(refuse_node_folder, options.data_path),)),
            # A member locks its folder, which refuses an unfinished restore, before it may restore from its archive.
            partial(_check_restore, options)
            if restores
            else partial(refuse_unfinished_restore, options.data_path),
            *((partial(_check_archive, options),) if options.archive else ()),
        ]
    )


def _check_auth_servers(options: BrokerOptions) -> None:
    if options.auth_http_addresses:
        AuthClient(options)


def _check_archive(options: BrokerOptions) -> None:
    from .archiving import check_archive  # slow to import

    check_archive(options)


def _check_restore(options: BrokerOptions) -> None:
    from .restoring import check_restore  # slow to import

    check_restore(options)


def _check_lookup(options: BrokerOptions) -> None:
    if options.lookupd_tls:
        client_context(options.tls, with_certificate=True)
    secret_in("--lookupd-auth-secret-file", options.lookupd_auth_secret_file)


def _check_contents(path: Path) -> None:
    """Raises StartupError: the folder is of an nsqd, or neither file with the reserved ids can be used."""
    if not path.is_dir():
        return
    refuse_nsqd_folder(path)
    problems = []
    for file in (path / BROKER_FILE, path / BROKER_COPY_FILE):
        try:
            with file.open("rb") as stream:
                decode_ids(stream.read(MAX_BROKER_BYTES + 1))
            return
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as exc:
            problems.append(f"{file}: {exc.strerror if isinstance(exc, OSError) else exc}")
    if problems:
        raise StartupError(f"--data-path: {problems[0]}")
