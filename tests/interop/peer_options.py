"""Shared code of the Python peers: the command line, the format of bodies on
standard input and output, and exiting at the first error.
"""

import argparse
import base64
import faulthandler
import json
import logging
import os
import ssl
import sys
from typing import Any


def parse() -> argparse.Namespace:
    """Parse and return the options, and start the clock of ``--timeout``. README.md describes the options."""
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["pub", "sub", "fail-over"])
    parser.add_argument("--addr", required=True)
    parser.add_argument("--topic", required=True)
    parser.add_argument("--channel")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--defer", type=int, default=0)
    parser.add_argument("--n", type=int, default=0)
    parser.add_argument("--max-in-flight", type=int, default=50)
    parser.add_argument("--requeue-first", action="store_true")
    parser.add_argument("--touch", action="store_true")
    parser.add_argument("--hold-first", action="store_true")
    parser.add_argument("--fail-first", action="store_true")
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--ca")
    parser.add_argument("--cert")
    parser.add_argument("--key")
    parser.add_argument("--snappy", action="store_true")
    parser.add_argument("--deflate", action="store_true")
    parser.add_argument("--auth")
    parser.add_argument("--timeout", type=float, default=30)
    options = parser.parse_args()
    # Ends the process even if its event loop is blocked, and prints the stack.
    faulthandler.dump_traceback_later(options.timeout, exit=True)
    return options


def connection(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments for a connection; pynsq and gnsq use the same names."""
    arguments: dict[str, Any] = {
        "tls_v1": options.tls,
        "snappy": options.snappy,
        "deflate": options.deflate,
        "auth_secret": options.auth,
    }
    if options.tls:
        tls_options = {"cert_reqs": ssl.CERT_REQUIRED, "ca_certs": options.ca}
        if options.cert:
            tls_options |= {"certfile": options.cert, "keyfile": options.key}
        arguments["tls_options"] = tls_options
    return arguments


def read_bodies() -> list[bytes]:
    """Read the bodies from standard input: one per line, in base64."""
    return [base64.b64decode(line) for line in sys.stdin]


def write_delivery(body: bytes, attempts: int) -> None:
    """Print one delivery as a line of JSON: ``body`` in base64, ``attempts`` an integer."""
    print(json.dumps({"body": base64.b64encode(body).decode(), "attempts": attempts}), flush=True)


class Fatal(logging.Handler):
    """Ends the process at the first record of this level, such as an error frame or a lost connection.

    The clients themselves only log the error and reconnect, so the test would not detect the failure.
    """

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)
        os._exit(1)
