"""Tells the service manager that started this process, such as systemd, what the server does (sd_notify's protocol)."""

from __future__ import annotations

import logging
import os
import socket
import time

logger = logging.getLogger("trio_nsq")


def notify_ready(status: str) -> None:
    """Say that the server is ready, and what it is doing, in a line for people.

    Like the other functions here, this does nothing unless the environment has NOTIFY_SOCKET. A failure is logged.
    """
    _notify(f"READY=1\nSTATUS={status}")


def notify_reloading() -> None:
    """Say that files are being read again. `notify_ready` ends that."""
    _notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")


def notify_stopping() -> None:
    """Say that the server is stopping."""
    _notify("STOPPING=1\nSTATUS=stopping")


def _notify(text: str) -> None:
    """Send one datagram. See sd_notify(3)."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):  # a socket without a file
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)  # a service manager that does not read must not stop the server
            sender.sendto(text.encode(), address)
    except OSError as error:
        logger.warning("NOTIFY_SOCKET %s: %s", os.environ["NOTIFY_SOCKET"], error.strerror)
