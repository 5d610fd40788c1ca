"""Secrets that a context refers to: the first line that a command prints, or an entry of a keyring."""

import os
import select
import shlex
import subprocess
import time

from trio_nsq.extras import install_hint
from trio_nsq.secret import MAX_SECRET_BYTES, decode_secret

from ..framework.errors import Failure, reason_of
from .context import keyring_entry

COMMAND_TIMEOUT_S = 60.0
"""Long enough for a person who must type a password or touch a key."""


def secret_of_command(command: str, *, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
    """Run a command, without a shell, and return the first line of its output.

    The command has no standard input, because this may be the messages to publish. Its standard error is that of qcli,
    so that it can ask for a password.

    Raises Failure: it cannot be started, fails, prints no secret, or does not end in time.
    """
    begun_s = time.monotonic()
    try:
        process = subprocess.Popen(shlex.split(command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    except (OSError, ValueError) as error:  # ValueError: a null byte
        raise _failed(command, f"cannot be started: {reason_of(error)}") from error
    try:
        assert process.stdout is not None
        output = _read(process.stdout.fileno(), begun_s + timeout_s)
        if output is not None and len(output) > MAX_SECRET_BYTES:
            raise _failed(command, f"prints more than {MAX_SECRET_BYTES} bytes")
        code = None
        if output is not None:
            code = process.wait(max(0.0, begun_s + timeout_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        code = None
    finally:
        # Not `communicate`, which would wait for other processes that have inherited the pipe.
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
    if output is None or code is None:
        raise _failed(command, f"did not end within {timeout_s:g} s, and was killed")
    if code:
        ending = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        raise _failed(command, f"{ending}; run it by hand to see why")
    secret = output.split(b"\n", 1)[0].rstrip(b"\r")
    if not secret:
        raise _failed(command, "printed no secret: the first line of its output is empty")
    return decode_secret(secret)


def _read(fd: int, deadline_s: float) -> bytes | None:
    """Read to the end, or until there is too much for a secret. None: the deadline passed."""
    output = b""
    while len(output) <= MAX_SECRET_BYTES:
        ready, _, _ = select.select([fd], [], [], max(0.0, deadline_s - time.monotonic()))
        if not ready:
            return None
        data = os.read(fd, MAX_SECRET_BYTES)
        if not data:
            break
        output += data
    return output


def _failed(command: str, problem: str) -> Failure:
    return Failure(f"auth_secret_command: {command!r} {problem}.")


def secret_of_keyring(entry: str) -> str:
    """Return the secret of an entry, SERVICE/USER. Raises Failure: there is no keyring, or no such entry."""
    service, user = keyring_entry(entry)
    try:
        import keyring
        import keyring.errors
    except ImportError as error:
        raise Failure(
            f"auth_secret_keyring: this needs the Python package keyring: {install_hint('keyring')}"
        ) from error
    try:
        secret: str | None = keyring.get_password(service, user)
    except keyring.errors.KeyringError as error:
        raise Failure(f"auth_secret_keyring: cannot read {entry} from the keyring: {error}") from error
    if not secret:
        raise Failure(
            f"auth_secret_keyring: the keyring has no entry {entry}. Create it: keyring set {service} {user}"
        )
    return secret
