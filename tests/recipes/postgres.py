"""Run a PostgreSQL server of Debian, with its own data, on a unix socket in a temporary folder."""

import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PATIENCE_S = 60.0
_PROGRAMS = Path("/usr/lib/postgresql")


def _folder_of_programs() -> Path:
    found = sorted(_PROGRAMS.glob("*/bin/initdb"), key=lambda path: int(path.parts[-3].split(".")[0]))
    if not found:
        reason = "PostgreSQL is missing: run 'make peers'"
        if os.environ.get("CI") == "true":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    return found[-1].parent


def _as_user(folder: Path) -> list[str]:
    """Return the beginning of a command that does not run as root, which the server refuses; give it the folder."""
    if os.geteuid() != 0:
        return []
    user = pwd.getpwnam("nobody")
    os.chown(folder, user.pw_uid, user.pw_gid)
    return ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups", "--no-new-privs"]


def _wait_until_ready(server: subprocess.Popen[bytes], programs: Path, folder: Path) -> None:
    until = time.monotonic() + PATIENCE_S
    while subprocess.run([programs / "pg_isready", "-q", "-h", folder], check=False).returncode != 0:
        assert server.poll() is None, (folder / "log").read_text()
        assert time.monotonic() < until, (folder / "log").read_text()
        time.sleep(0.02)


@contextmanager
def postgres() -> Iterator[str]:
    """Run a server; yield the DSN of a database. It is killed at the end."""
    programs = _folder_of_programs()
    # Not in the test's folder, which only its owner may enter; and the path of a socket must be short.
    folder = Path(tempfile.mkdtemp(prefix="nsq-postgres-", dir="/tmp"))
    prefix = _as_user(folder)
    environment = {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"}
    data = folder / "data"
    try:
        subprocess.run(
            [
                *prefix,
                programs / "initdb",
                f"--pgdata={data}",
                "--username=test",
                "--auth=trust",
                "--no-sync",
                "--no-instructions",
            ],
            cwd=folder,
            env=environment,
            check=True,
            capture_output=True,
            timeout=PATIENCE_S,
        )
        with (
            (folder / "log").open("wb") as log,
            subprocess.Popen(
                [
                    *prefix,
                    programs / "postgres",
                    "-D",
                    data,
                    "-k",
                    folder,
                    "-c",
                    "listen_addresses=",
                    "-c",
                    "fsync=off",
                ],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
            ) as server,
        ):
            try:
                _wait_until_ready(server, programs, folder)
                yield f"host={folder} user=test dbname=postgres connect_timeout=60"
            finally:
                server.terminate()
                try:
                    server.wait(PATIENCE_S)
                except subprocess.TimeoutExpired:
                    server.kill()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
