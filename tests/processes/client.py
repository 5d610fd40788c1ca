"""Run `qcli` as a process of another program: see `shell.py`. The arguments are its socket, and those of `qcli`.

It starts in a twentieth of the time of `qcli`, because it imports only this.
"""

import json
import os
import signal
import socket
import sys

FORWARDED = (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)


def main(path: str, arguments: list[str]) -> int:
    """Return the exit code of the process; negative: the number of the signal that ended it."""
    request = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}  # noqa: PTH109 (pathlib is slow to import)
    data = json.dumps(request).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        for number in FORWARDED:
            signal.signal(number, lambda number, _: server.send(bytes([number])))
        socket.send_fds(server, [len(data).to_bytes(4, "big")], (0, 1, 2))
        server.sendall(data)
        # Only the process has the streams now, so that its end ends a pipe.
        nowhere = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(nowhere, fd)
        code = b""
        while len(code) < 2 and (received := server.recv(2 - len(code))):
            code += received
    return int.from_bytes(code, "big", signed=True) if len(code) == 2 else 1


if __name__ == "__main__":
    ended = main(sys.argv[1], sys.argv[2:])
    if ended < 0:
        signal.signal(-ended, signal.SIG_DFL)
        os.kill(os.getpid(), -ended)
    sys.exit(ended)
