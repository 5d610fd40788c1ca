"""`qcli nodes --check`: the problems that it finds, and its exit codes for monitoring."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli.support import Cli, Result, Run
from fleet.support import Fleet, cli_of, hung, read_only_broker, refusing_broker, service_hung, wait_until
from interop.peers import Broker, qcli_serve
from qcli.framework.errors import ExitCode

pytestmark = pytest.mark.interop

CHECK = ("nodes", "--check")
OK = 0


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A broker with 3 messages in each of two channels, and one in a topic without channels."""
    with qcli_serve(tmp_path_factory.mktemp("checked") / "data") as running:
        running.create("t", "c", "dead-letters")
        running.create("alone")
        for topic in ("t", "t", "t", "alone"):
            running.post("/pub", b"x", topic=topic)
        wait_until(lambda: age_ms(running) >= 2, "the messages are older than a millisecond")
        yield running


def age_ms(broker: Broker) -> int:
    return int(broker.channel_stats("t", "c")["oldest_message_age_ms"])


def problems(result: Result) -> list[tuple[str, str]]:
    """The check and the topic or channel of each problem."""
    return [(record["check"], record["about"]) for record in result.records]


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ("", []),
        ("--max-depth 3", []),
        ("--max-depth 2", [("depth", "t/c"), ("depth", "t/dead-letters")]),
        ("--max-depth 0", [("depth", "alone"), ("depth", "t/c"), ("depth", "t/dead-letters")]),
        ("--max-age 1h", []),
        ("--max-age 1ms", [("age", "t/c")]),
        ("--min-free 1KiB", []),
        ("--min-free 100%", [("disk", "")]),
        ("--min-free 500TB", [("disk", "")]),
        ("--min-brokers 1", []),
        ("--min-brokers 2", [("brokers", "")]),
    ],
)
def test_thresholds(run_here: Run, broker: Broker, options: str, found: list[tuple[str, str]]) -> None:
    options = options if "--min-free" in options else f"{options} --min-free 0"
    as_json = run_here(cli_of(broker), *CHECK, *options.split(), "--format", "json")
    assert problems(as_json) == found
    text = run_here(cli_of(broker), *CHECK, *options.split())
    assert as_json.code == text.code == (ExitCode.FAILURE if found else OK)
    summary, *lines = text.out.decode().splitlines()
    asked = "1 broker, 0 nsqlookupds"
    many = f"{len(found)} problem{'s' * (len(found) != 1)}"
    assert summary == (f"CRITICAL: {many} ({asked})" if found else f"OK: {asked}")
    for line, record in zip(lines, as_json.records, strict=True):
        where = " ".join(filter(None, (record["address"], record["about"])))
        assert line.split(": ")[:2] == ([record["check"], where] if where else lines[0].split(": "))
    assert text.err == ""


def test_lines_for_people(run_here: Run, broker: Broker) -> None:
    address = broker.http_address
    lines = run_here(cli_of(broker), *CHECK, "--max-depth", "2", "--min-free", "0").out.decode()
    assert f"depth: {address} t/c: 3 messages wait, more than 2\n" in lines
    tsv = run_here(cli_of(broker), *CHECK, "--max-depth", "2", "--format", "tsv").out.decode()
    assert tsv.startswith("check\taddress\tabout\tproblem\n")
    assert f"depth\t{address}\tt/c\t3 messages wait, more than 2\n" in tsv


def test_health(tmp_path: Path, run_here: Run) -> None:
    with qcli_serve(tmp_path / "data") as broker:
        broker.create("t")
        topic = tmp_path / "data" / "topics" / "t.topic"
        assert topic.is_dir()
    (topic / "state.json").unlink(missing_ok=True)
    (topic / "state.json.previous").unlink(missing_ok=True)
    (topic / "state.json").mkdir()
    with qcli_serve(tmp_path / "data") as broker:
        checked = run_here(cli_of(broker), *CHECK, "--min-free", "0")
        shown = run_here(cli_of(broker), "nodes", "--format", "json")
        table = run_here(cli_of(broker), "nodes")
    assert checked.code == ExitCode.FAILURE
    assert f"health: {broker.http_address}: " in checked.out.decode()
    assert (shown.code, shown.records[0]["status"]) == (OK, "unhealthy")
    assert f"{broker.http_address} is not healthy: " in table.out.decode()


def test_archives(tmp_path: Path, run_here: Run) -> None:
    archive = ("--archive", str(tmp_path / "archive"))
    with qcli_serve(tmp_path / "one", *archive) as one, qcli_serve(tmp_path / "two", *archive) as two:

        def checked(broker: Broker) -> Result:
            return run_here(cli_of(broker), *CHECK, "--min-free", "0")

        wait_until(
            lambda: "archived" in run_here(cli_of(one), "stat", "--once").out.decode(), "one is archived"
        )
        assert checked(one).code == OK
        wait_until(lambda: checked(two).code == ExitCode.FAILURE, "the other one has no place in the archive")
        (line,) = checked(two).out.decode().splitlines()[1:]
        assert line.startswith(f"archive: {two.http_address}: its archive is not written, and is ")
        assert line.endswith("needs an archive of its own")


def test_exit_codes_of_servers_that_do_not_answer(
    run_here: Run, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("admin_client", "lookupd_client"):
        monkeypatch.setattr(f"qcli.broker.{module}.REQUEST_TIMEOUT_S", 1.0)
    with hung(fleet.ours[0]):
        some = run_here(fleet.discovering, *CHECK, "--format", "json", "--min-brokers", "4")
    assert (some.code, problems(some)) == (ExitCode.PARTIAL, [("reachable", ""), ("brokers", "")])
    assert some.records[0]["address"] == fleet.ours[0].http_address
    with service_hung(fleet, fleet.lookupds[0]):
        service = run_here(fleet.discovering, *CHECK, "--format", "json")
    assert (service.code, problems(service)) == (ExitCode.PARTIAL, [("reachable", "")])
    none = run_here(Cli("", "127.0.0.1:1"), *CHECK)
    assert none.code == ExitCode.UNREACHABLE
    assert none.out.decode().splitlines()[1] == (
        "reachable: No broker answers at 127.0.0.1:1: connection refused."
    )
    assert run_here(fleet.discovering, *CHECK, "--min-free", "0").code == OK


def test_broker_that_is_not_registered(tmp_path: Path, run_here: Run, fleet: Fleet) -> None:
    lookupd = fleet.lookupds[0]
    with qcli_serve(tmp_path / "data", f"--lookupd-tcp-address={lookupd.tcp_address}") as broker:
        cli = Cli("", broker.http_address, fleet.discovering.env)
        wait_until(
            lambda: run_here(cli, *CHECK, "--format", "json").records[0]["problem"].count(":") == 1,
            "it is registered at one service",
        )
        checked = run_here(cli, *CHECK, "--format", "json")
    assert (checked.code, problems(checked)) == (ExitCode.FAILURE, [("registered", "")])
    record: dict[str, Any] = checked.records[0]
    assert record["address"] == broker.http_address
    assert record["problem"] == f"not registered at {fleet.lookupds[1].http_address}"


def test_refusing_and_read_only_brokers(tmp_path: Path, run_here: Run) -> None:
    with refusing_broker(tmp_path / "refusing") as broker:
        refused = run_here(cli_of(broker), *CHECK, "--format", "json")
    assert (refused.code, problems(refused)) == (ExitCode.FAILURE, [("reachable", "")])
    assert "requires a secret" in refused.records[0]["problem"]
    with read_only_broker(tmp_path / "read-only") as broker:
        assert run_here(cli_of(broker), *CHECK, "--min-free", "0").code == OK


def test_what_an_nsqd_does_not_tell(run_here: Run, fleet: Fleet, topic: str) -> None:
    fleet.nsqd.create(topic, "c")
    address = fleet.nsqd.http_address
    silent = run_here(cli_of(fleet.nsqd), *CHECK)
    assert (silent.code, silent.err) == (OK, "")
    noted = run_here(cli_of(fleet.nsqd), *CHECK, "--max-age", "1h", "--min-free", "1%")
    assert (noted.code, noted.err) == (
        OK,
        f"Note: disk space not checked on {address}, which does not tell: is it an nsqd?\n"
        f"Note: ages of messages not checked on {address}, which does not tell: is it an nsqd?\n",
    )


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        ("--max-depth 1", "--max-depth needs --check."),
        ("--min-free 1%", "--min-free needs --check."),
        ("--check --min-free 101%", "'101%' is not a share such as 5%."),
        ("--check --min-free x%", "'x%' is not a share such as 5%."),
        ("--check --min-free nan%", "'nan%' is not a share such as 5%."),
        ("--check --min-free 5", ""),
        ("--check --min-free 5x", "'5x' is not a size such as 10GiB, nor a share such as 5%."),
        ("--check --max-age 5", "'5' has no unit"),
    ],
)
def test_wrong_thresholds(run_here: Run, args: str, complaint: str) -> None:
    result = run_here(Cli("", "127.0.0.1:1"), "nodes", *args.split())
    if complaint:
        assert (result.code, complaint in result.err) == (ExitCode.USAGE, True), result.err
    else:
        assert result.code == ExitCode.UNREACHABLE
