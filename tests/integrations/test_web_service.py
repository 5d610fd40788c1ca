"""A web service on FastAPI and uvicorn: killed, and stopped in order."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from integrations.support import PATIENCE_S, Ledger, Worker, running, until
from interop.peers import Broker, free_ports, qcli_serve

pytestmark = pytest.mark.slow

ORDERS = 20


class Service:
    """A running service, and a client of it that keeps its connections."""

    def __init__(self, worker: Worker, http: httpx.Client) -> None:
        self.worker = worker
        self._http = http

    def is_up(self) -> bool:
        assert self.worker.process.poll() is None, self.worker.output()
        try:
            return self._http.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def order(self, number: int) -> int:
        return self._http.post(f"/orders/{number}").status_code


@contextmanager
def serving(nsqd: str, ledger: Ledger, *, handle_s: float = 0) -> Iterator[Service]:
    (port,) = free_ports(1)
    env = {"NSQD": nsqd, "LEDGER": str(ledger.path), "HANDLE_S": str(handle_s)}
    words = ("integrations.web_app:app", "--port", str(port), "--log-level", "warning")
    with running("uvicorn", *words, env=env, output=ledger.path.with_suffix(".log")) as worker:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as http:
            service = Service(worker, http)
            until(service.is_up)
            yield service


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with qcli_serve(tmp_path / "data", "--sync=interval") as broker:
        broker.create("orders", "mail")
        yield broker


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger")


def test_killed_service_loses_no_order_and_stops_in_order(broker: Broker, ledger: Ledger) -> None:
    with serving(broker.tcp_address, ledger, handle_s=1000) as service:
        assert [service.order(number) for number in range(ORDERS)] == [202] * ORDERS
        until(lambda: broker.channel_stats("orders", "mail")["in_flight_count"] == 10)
        service.worker.kill()
    assert ledger.lines() == []
    with serving(broker.tcp_address, ledger) as service:
        ledger.wait_for(*(f"handled {number}" for number in range(ORDERS)))
        assert service.worker.stop() in (0, -signal.SIGTERM), service.worker.output()
    assert ledger.lines()[-1] == "left"
    until(lambda: broker.is_drained("orders", "mail"))
