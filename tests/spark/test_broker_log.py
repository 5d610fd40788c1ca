"""Tests for reading a broker's log: unreachable brokers and truncated answers."""

import socket
import threading
from pathlib import Path

import pytest

from cli.support import Cli
from interop.peers import qcli_serve
from spark.support import cli_of, numbers
from trio_nsq.client.errors import BrokerUnreachable
from trio_nsq.client.reading.broker_log import BrokerLog, LogReplaced
from trio_nsq.log.gaps import Span
from trio_nsq.log.records import RecordBatch


def test_unreachable_broker_is_retried(topic: str, tmp_path: Path) -> None:
    with qcli_serve(tmp_path / "data") as broker:
        cli_of(broker).publish(topic, [b"%09d" % n * 20 for n in range(20_000)])
        port = broker.http_address.rpartition(":")[2]
        log = BrokerLog(broker.http_address, topic)
        reading = log.read(Span(0, 20_000))
        sequences: list[int] = []
        found = next(reading)
        sequences += range(found.base_sequence, found.next_sequence)  # type: ignore[union-attr]
        broker.process.kill()
        broker.process.wait()
        with qcli_serve(tmp_path / "data", f"--http-address=127.0.0.1:{port}"):
            for found in reading:
                sequences += range(found.base_sequence, found.next_sequence)  # type: ignore[union-attr]
    assert sequences == list(range(20_000))


def test_records_are_cut_to_the_span(qcli: Cli, topic: str) -> None:
    qcli.publish(topic, numbers(10))
    log = BrokerLog(qcli.http_address, topic)
    (whole,), (part,) = (list(log.read(span)) for span in (Span(0, 10), Span(3, 7)))
    assert isinstance(whole, RecordBatch)
    assert isinstance(part, RecordBatch)
    assert (part.base_sequence, part.next_sequence, part.first_id) == (3, 7, whole.first_id + 3)
    assert part.messages.bodies() == numbers(4, 3)
    assert log.id_at(5) == f"{whole.first_id + 5:016x}"


def test_log_of_another_identity_is_not_read(qcli: Cli, topic: str) -> None:
    """A task is planned for a log; another broker may have the address when it runs."""
    for name in (topic, f"{topic}.other"):
        qcli.publish(name, numbers(10))
    planned = BrokerLog(qcli.http_address, topic).bounds().incarnation
    span = Span(0, 10)
    assert list(BrokerLog(qcli.http_address, topic, incarnation=planned).read(span))
    with pytest.raises(LogReplaced, match="is not the one that was planned"):
        list(BrokerLog(qcli.http_address, f"{topic}.other", incarnation=planned).read(span))


def test_channel_of_another_log_is_not_moved(qcli: Cli, topic: str) -> None:
    """The topic was deleted and created again after its messages were stored."""
    log = BrokerLog(qcli.http_address, topic)
    qcli.publish(topic, numbers(10))
    log.open_channel("c")
    planned = log.bounds().incarnation
    assert planned is not None
    log.move_channel("c", 4, planned)
    assert log.position_of("c") == 4
    assert qcli("topic", "delete", "--yes", topic).code == 0
    qcli.publish(topic, numbers(10))
    log.open_channel("c")
    at = log.position_of("c")
    with pytest.raises(LogReplaced, match="is not the one that was planned"):
        log.move_channel("c", 4, planned)
    with pytest.raises(LogReplaced, match="is not the one that was planned"):
        BrokerLog(qcli.http_address, topic, incarnation=planned).move_channel("c", 4)
    assert log.position_of("c") == at


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-",
        b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nX-NSQ-End-Sequence: 5\r\nTransfer-Encoding: chunked\r\n\r\n20\r\n\x89NSQ",
        b"HTTP/1.1 200 OK\r\nX-NSQ-End-Sequence: 5\r\nTransfer-Encoding: chunked\r\n\r\n2",
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\nwhat",
        b"220 smtp ready\r\n",
    ],
)
def test_truncated_answer_is_discarded(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for _ in range(2):
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(answer)

        server = threading.Thread(target=serve)
        server.start()
        log = BrokerLog(f"127.0.0.1:{listener.getsockname()[1]}", "t", patience_s=0)
        with pytest.raises(BrokerUnreachable):
            log.bounds()
        with pytest.raises(BrokerUnreachable):
            list(log.read(Span(0, 5)))
        server.join()
