"""A log is exported once, at whatever addresses its broker is found, now and later."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from shutil import copytree

import pytest

from interop.peers import Broker, free_address, qcli_serve
from qcli.framework.errors import ExitCode
from spark.support import cli_of, column, export, numbers, rows, run_in_process, until
from trio_nsq.spark.export.job import ExportJob, open_export
from trio_nsq.spark.export.request import ExportRequest
from trio_nsq.spark.logs import BrokerPlace
from trio_nsq.spark.runtime.engine import run_inline


def spelled(broker: Broker, host: str) -> str:
    """Return the HTTP address of a broker with another name of this machine."""
    return f"{host}:{broker.http_address.rpartition(':')[2]}"


def at(*addresses: str) -> list[str]:
    return ["--nsqd-http-address", ",".join(addresses)]


def bodies(folder: Path) -> list[str]:
    """Return the bodies in the files, each as often as it is there."""
    return sorted(body.decode() for body in column(folder, "body"))


def expected(count: int) -> list[str]:
    return sorted(body.decode() for body in numbers(count))


def manifest_of(folder: Path, topic: str) -> Path:
    return folder / "_nsq" / topic / "manifest.json"


def as_older_version(folder: Path, topic: str) -> None:
    """Make the manifest one of a version that knew a log by the address of its broker only."""
    path = manifest_of(folder, topic)
    found = json.loads(path.read_bytes())
    for ranges in found["brokers"].values():
        assert ranges.pop("incarnation")
    path.write_text(json.dumps(found))


@pytest.mark.parametrize("older", [False, True], ids=["", "of an older version"])
def test_other_spelling_later(broker: Broker, topic: str, tmp_path: Path, older: bool) -> None:
    cli, folder = cli_of(broker), tmp_path / "a"
    cli.publish(topic, numbers(50))
    export(cli, topic, folder)
    if older:
        as_older_version(folder, topic)
    assert export(cli, topic, folder, *at(spelled(broker, "localhost")))["messages"] == 0
    cli.publish(topic, numbers(70)[50:])
    assert export(cli, topic, folder, *at(spelled(broker, "[::ffff:127.0.0.1]")))["messages"] == 20
    assert bodies(folder) == expected(70)
    # The name that a log got first stays, so that broker and seq identify a message.
    assert set(column(folder, "broker")) == {broker.http_address}


def test_several_spellings_at_once(broker: Broker, topic: str, tmp_path: Path) -> None:
    cli, folder = cli_of(broker), tmp_path / "a"
    cli.publish(topic, numbers(50))
    every = at(broker.http_address, spelled(broker, "localhost"), spelled(broker, "[::ffff:127.0.0.1]"))
    assert export(cli, topic, folder, *every)["messages"] == 50
    cli.publish(topic, numbers(60)[50:])
    assert export(cli, topic, folder, *at(spelled(broker, "localhost")), "--channel", "c")["messages"] == 10
    assert bodies(folder) == expected(60)


@contextmanager
def serving(data: Path, address: str, *flags: str) -> Iterator[Broker]:
    """Run a broker at an HTTP address, which another one may have had before."""
    with qcli_serve(data, f"--http-address={address}", *flags) as broker:
        yield broker


def test_brokers_that_change_places(tmp_path: Path) -> None:
    """Two brokers get each other's address, and later a third one the address that one of them had."""
    here, there, third = free_address(), free_address(), free_address()
    folder = tmp_path / "a"
    with serving(tmp_path / "1", here) as one, serving(tmp_path / "2", there) as two:
        cli_of(one).publish("t", numbers(30))
        cli_of(two).publish("t", numbers(50)[30:])
        assert export(cli_of(one), "t", folder, *at(here, there))["messages"] == 50
    with serving(tmp_path / "1", there) as one, serving(tmp_path / "2", here) as two:
        cli_of(one).publish("t", numbers(60)[50:])
        cli_of(two).publish("t", numbers(70)[60:])
        assert export(cli_of(one), "t", folder, *at(here, there))["messages"] == 20
        assert bodies(folder) == expected(70)
    with (
        serving(tmp_path / "1", here) as one,
        serving(tmp_path / "2", third) as two,
        serving(tmp_path / "3", there) as three,
    ):
        cli_of(three).publish("t", numbers(80)[70:])
        refused = run_in_process(cli_of(three), "to-parquet", "t", str(folder), *at(there))
        assert (refused.code, "is not the one that was exported" in refused.err) == (1, True)
        # Once the broker that had the address is found elsewhere, this is another log, and gets a name of its own.
        assert export(cli_of(three), "t", folder, *at(here, third, there))["messages"] == 10
        assert export(cli_of(three), "t", folder, *at(here, third, there))["messages"] == 0
    assert bodies(folder) == expected(80)
    found = rows(folder, "broker", "seq").to_pylist()
    assert len({(row["broker"], row["seq"]) for row in found}) == 80


def test_broker_that_is_away_from_an_address_that_another_one_had(tmp_path: Path) -> None:
    """The log that had the address before is found elsewhere; the one that is there now is not."""
    here, there = free_address(), free_address()
    folder = tmp_path / "a"
    with serving(tmp_path / "1", here) as one, serving(tmp_path / "2", there) as two:
        cli_of(one).publish("t", numbers(3))
        cli_of(two).publish("t", numbers(5)[3:])
        export(cli_of(one), "t", folder, *at(here, there))
    with serving(tmp_path / "1", there) as one:
        cli_of(one).publish("t", numbers(7)[5:])
        refused = run_in_process(cli_of(one), "to-parquet", "t", str(folder), *at(here, there))
    assert (refused.code, here in refused.err) == (ExitCode.PARTIAL, True)
    assert bodies(folder) == expected(7)


def test_rounds_go_on_at_the_new_address(tmp_path: Path) -> None:
    """A broker restarts at another address while a job runs, which keeps asking at the old one, too."""
    old, new = free_address(), free_address()
    request = ExportRequest("t", str(tmp_path / "a"))

    def run_round(job: ExportJob, *addresses: str) -> int:
        job.run(run_inline, job.plan([BrokerPlace(each, "t") for each in addresses]), lambda *_: None)
        return job.result.messages

    with ExitStack() as stack:
        with serving(tmp_path / "1", old) as broker:
            cli_of(broker).publish("t", numbers(20))
            job = stack.enter_context(open_export(request, [BrokerPlace(old, "t")]))
            assert run_round(job, old) == 20
        with serving(tmp_path / "1", new) as broker:
            cli_of(broker).publish("t", numbers(30)[20:])
            assert run_round(job, old, new) == 30
            assert not job.failures  # its log is read at the other address
            assert run_round(job, old, new) == 30
        with serving(tmp_path / "1", old) as broker:
            cli_of(broker).publish("t", numbers(40)[30:])
            until(lambda: run_round(job, old, new) == 40)  # the old address is asked in the background
    assert bodies(tmp_path / "a") == expected(40)


def test_copy_of_a_data_folder_is_refused_once_it_differs(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    with qcli_serve(tmp_path / "1") as broker:
        cli_of(broker).publish("t", numbers(20))
    copytree(tmp_path / "1", tmp_path / "2")
    with qcli_serve(tmp_path / "1") as one, qcli_serve(tmp_path / "2") as two:
        every = at(one.http_address, two.http_address)
        assert export(cli_of(one), "t", folder, *every)["messages"] == 20
        cli_of(one).publish("t", numbers(30)[20:])
        assert export(cli_of(one), "t", folder, *every)["messages"] == 10
        cli_of(two).publish("t", numbers(40)[30:])
        refused = run_in_process(cli_of(one), "to-parquet", "t", str(folder), *every)
        assert (refused.code, "is a copy of the one at" in refused.err) == (4, True)
    assert bodies(folder) == expected(30)
