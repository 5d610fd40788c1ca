"""Secrets that a context refers to: the first line that a command prints, or an entry of a keyring."""

import os
import select
import shlex
import subprocess
import time

from trio_nsq.access.secret import MAX_SECRET_BYTES, decode_secret
from trio_nsq.platform.extras import install_hint

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
    deadline_s = time.monotonic() + timeout_s
    try:
        process = subprocess.Popen(shlex.split(command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    except (OSError, ValueError) as error:  # ValueError: a null byte
        raise _failed(command, f"cannot be started: {reason_of(error)}") from error
    try:
        output = _output(process, deadline_s)
        if output is not None and len(output) > MAX_SECRET_BYTES:
            raise _failed(command, f"prints more than {MAX_SECRET_BYTES} bytes")
        code = process.wait(max(0.0, deadline_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        output = None
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
    if output is None:
        raise _failed(command, f"did not end within {timeout_s:g} s, and was killed")
    if code:
        ending = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        raise _failed(command, f"{ending}; run it by hand to see why")
    secret = output.split(b"\n", 1)[0].rstrip(b"\r")
    if not secret:
        raise _failed(command, "printed no secret: the first line of its output is empty")
    return decode_secret(secret)


def _output(process: subprocess.Popen[bytes], deadline_s: float) -> bytes | None:
    """Return what a process prints until it ends, or is too much for a secret. None: the deadline passed.

    Other processes may have inherited the pipe, so its end is not awaited.
    """
    assert process.stdout is not None
    pipe, output = process.stdout.fileno(), b""
    ended = os.pidfd_open(process.pid)
    try:
        while len(output) <= MAX_SECRET_BYTES:
            ready, _, _ = select.select([pipe, ended], [], [], max(0.0, deadline_s - time.monotonic()))
            if not ready:
                return None
            if pipe not in ready:
                ready, _, _ = select.select([pipe], [], [], 0)  # what it printed just before it ended
            data = os.read(pipe, MAX_SECRET_BYTES) if ready else b""
            if not data:
                break
            output += data
    finally:
        os.close(ended)
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
