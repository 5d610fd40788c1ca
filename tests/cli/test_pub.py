"""Tests for `qcli pub`."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cli.support import Cli, lines, only_ours
from interop.peers import Broker, nsqd, qcli_serve
from qcli.framework.output import rate

MIB = 1024 * 1024


def stored(qcli: Cli, broker: Broker, topic: str, count: int) -> list[bytes]:
    """Return the first `count` messages of a topic in order, through its first channel; there must be no
    more.
    """
    result = qcli("tail", f"{topic}/check", "-n", str(count), "--null") if count else None
    assert broker.channel_stats(topic, "check")["message_count"] == count
    return result.out.split(b"\0")[:-1] if result else []


@pytest.mark.parametrize(
    ("args", "data", "messages"),
    [
        pytest.param([], b"one\ntwo\n", [b"one", b"two"], id="lines"),
        pytest.param([], b"one\ntwo", [b"one", b"two"], id="last line unterminated"),
        pytest.param([], b"one\r\ntwo\r", [b"one\r", b"two\r"], id="carriage returns kept"),
        pytest.param([], b"\xff\xfe\x80\n\xc3\n  \t\n", [b"\xff\xfe\x80", b"\xc3", b"  \t"], id="bytes kept"),
        pytest.param([], b"x" * MIB + b"\n" + b"y" * MIB, [b"x" * MIB, b"y" * MIB], id="longest lines"),
        pytest.param(["-0"], b"a\nb\0\nc", [b"a\nb", b"\nc"], id="null"),
        pytest.param(["-d", r"\t"], b"a\tb\nc\t", [b"a", b"b\nc"], id="tab"),
        pytest.param(["-d", r"\r\n"], b"a\r\nb\rc\r\nd", [b"a", b"b\rc", b"d"], id="two bytes"),
        pytest.param(["-d", r"\xff"], b"a\xffb", [b"a", b"b"], id="any byte"),
        pytest.param(["--batch-size", "2"], b"1\n2\n3\n4\n5\n", [b"1", b"2", b"3", b"4", b"5"], id="batches"),
        pytest.param(["--batch-size", "1"], b"1\n2\n3\n", [b"1", b"2", b"3"], id="single"),
    ],
)
def test_messages_are_the_bytes_between_delimiters(
    qcli: Cli, broker: Broker, topic: str, args: list[str], data: bytes, messages: list[bytes]
) -> None:
    broker.create(topic, "check")
    result = qcli("pub", topic, *args, stdin=data)
    assert (result.code, result.out) == (0, b"")
    assert f"{len(messages)} message" in result.err
    if b"\0" not in b"".join(messages):
        assert stored(qcli, broker, topic, len(messages)) == messages


def test_bytes_survive_pub_and_tail(qcli: Cli, topic: str) -> None:
    everything = bytes(range(256)) * 3
    assert qcli("pub", topic, stdin=everything).code == 0
    result = qcli("tail", f"{topic}/check", "-n", "4")
    assert result.out == everything + b"\n"  # three line feeds inside, and one added at the end


def test_many_messages_arrive_once_and_in_order(qcli: Cli, topic: str) -> None:
    bodies = [b"%d" % number for number in range(100_000)]
    result = qcli("pub", topic, stdin=lines(bodies))
    assert result.code == 0
    assert result.err.startswith("100,000 messages (477.4 KiB) published")
    assert qcli("tail", f"{topic}/check", "-n", "100000").out == lines(bodies)


def test_empty_lines_are_skipped_and_reported(qcli: Cli, broker: Broker, topic: str) -> None:
    broker.create(topic, "check")
    result = qcli("pub", topic, stdin=b"\n\na\n\nb\n\n")
    assert result.code == 0
    assert result.err.startswith("2 messages (2 B) published")
    assert result.err.endswith("; 4 empty skipped\n")
    assert stored(qcli, broker, topic, 2) == [b"a", b"b"]


def test_empty_input_is_a_success(qcli: Cli, topic: str) -> None:
    result = qcli("pub", topic)
    assert result.code == 0
    assert result.err.startswith("0 messages")


def test_quiet_writes_nothing(qcli: Cli, topic: str) -> None:
    assert qcli("pub", topic, "--quiet", stdin=b"a\n\n").err == ""


def test_files_are_read_in_order_and_each_ends_its_last_line(
    qcli: Cli, broker: Broker, topic: str, tmp_path: Path
) -> None:
    broker.create(topic, "check")
    (tmp_path / "one").write_bytes(b"1\n2")
    (tmp_path / "two").write_bytes(b"3\n4\n")
    result = qcli("pub", topic, str(tmp_path / "one"), "-", str(tmp_path / "two"), stdin=b"x")
    assert result.code == 0
    assert stored(qcli, broker, topic, 5) == [b"1", b"2", b"x", b"3", b"4"]


def test_named_pipe_as_a_file(qcli: Cli, topic: str, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with qcli.running("pub", topic, str(pipe)) as pub:
        with pipe.open("wb") as writer:
            writer.write(b"a\nb\n")
        assert "2 messages" in pub.end().err


def test_unreadable_file_is_reported_before_publishing(
    qcli: Cli, broker: Broker, topic: str, tmp_path: Path
) -> None:
    broker.create(topic, "check")
    (tmp_path / "a.log").write_bytes(b"a\n")
    for path, reason in (
        (tmp_path / "missing.log", "No such file or directory"),
        (tmp_path, "Is a directory"),
        (tmp_path / ("x" * 300), "File name too long"),
    ):
        result = qcli("pub", topic, str(tmp_path / "a.log"), str(path))
        assert result.code == 2
        assert result.err == f"Error: Cannot read {path}: {reason}. Nothing was published.\n"
    assert stored(qcli, broker, topic, 0) == []


def test_text_in_place_of_a_file(qcli: Cli, topic: str) -> None:
    result = qcli("pub", topic, "hello world")
    assert result.code == 2
    assert "To publish the text itself: echo 'hello world' | qcli pub TOPIC.\n" in result.err


def test_slow_input_is_published_promptly(qcli: Cli, topic: str) -> None:
    """A message does not wait for a full batch or the end of the input."""
    with qcli.running("tail", f"{topic}/check") as tail, qcli.running("pub", topic) as pub:
        for body in (b"first\n", b"second\n"):
            pub.write(body)
            assert tail.read_line() == body


def test_too_long_message_is_named_and_ends_the_command(qcli: Cli, broker: Broker, topic: str) -> None:
    broker.create(topic, "check")
    result = qcli("pub", topic, stdin=b"a\n\nb\n" + b"x" * (MIB + 1) + b"\nc\n")
    assert result.code == 4
    assert "Error: Message 4 of standard input is longer than 1048576 bytes" in result.err
    assert "2 messages acknowledged" in result.err
    assert stored(qcli, broker, topic, 2) == [b"a", b"b"]


def test_too_long_message_is_detected_before_its_end(qcli: Cli, topic: str) -> None:
    with qcli.running("pub", topic, "--max-msg-size", "10") as pub:
        pub.write(b"x" * 11 + b" and no end")
        assert pub.process.wait(30) == 1
        assert "Message 1 of standard input" in pub.hear_line()


def test_message_too_long_for_the_broker(qcli: Cli, topic: str) -> None:
    result = qcli("pub", topic, "--max-msg-size", str(2 * MIB), stdin=b"x" * (MIB + 1))
    assert result.code == 1
    assert f"The broker at {qcli.tcp_address} refused: " in result.err
    assert "too big" in result.err
    assert "Its limits are --max-msg-size and --max-body-size of 'qcli serve' and nsqd." in result.err


def test_deferred_messages_wait(qcli: Cli, broker: Broker, topic: str) -> None:
    broker.create(topic, "check")
    begun = time.monotonic()
    assert qcli("pub", topic, "--defer", "1.5s", stdin=b"later\n" * 3).code == 0
    stats = broker.channel_stats(topic, "check")
    if time.monotonic() - begun < 1.4:
        assert (stats["deferred_count"], stats["depth"]) == (3, 0)
    assert qcli("tail", f"{topic}/check", "-n", "3").out == b"later\n" * 3
    assert time.monotonic() - begun >= 1.5


def test_deferred_messages_keep_their_order(qcli: Cli, topic: str) -> None:
    lines = [b"%d" % number for number in range(3000)]
    assert qcli("pub", topic, "--defer", "1h", stdin=b"\n".join(lines)).code == 0
    assert qcli("tail", topic, "--from", "0", "--to", "latest").out.splitlines() == lines


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_publishes_what_was_read(
    qcli: Cli, broker: Broker, topic: str, number: signal.Signals, code: int
) -> None:
    broker.create(topic, "check")
    with qcli.running("tail", f"{topic}/check") as tail, qcli.running("pub", topic) as pub:
        pub.write(b"a\nb\nunfinish")
        assert tail.read(4) == b"a\nb\n"
        pub.process.send_signal(number)
        assert pub.process.wait(30) == code
        said = pub.hear_line()
        assert said.startswith("2 messages")
        assert said.endswith("; an incomplete message (8 B) was not published\n")


@pytest.mark.parametrize(
    ("per_second", "text"), [(0, "0"), (0.31, "0.3"), (9.5, "9.5"), (10, "10"), (1234, "1,234")]
)
def test_low_rates_have_a_decimal(per_second: float, text: str) -> None:
    assert rate(per_second) == text


def test_report_starts_on_a_new_line_after_ctrl_c(qcli: Cli, topic: str) -> None:
    with qcli.on_terminal("pub", topic) as terminal, qcli.running("tail", f"{topic}/check") as tail:
        terminal.type(b"typed\n")
        assert tail.read_line() == b"typed\n"
        assert terminal.interrupt() == 130
    assert b"\r\n\r\n1 message (5 B) published" in terminal.shown


def test_user_is_asked_for_input_on_a_terminal(qcli: Cli, topic: str, tmp_path: Path) -> None:
    asked = b"Reading messages from the terminal, one per line; Ctrl-D ends.\r\n"
    (tmp_path / topic).write_bytes(b"line\n")
    command = f"cd {tmp_path} && {sys.executable} -m qcli pub {topic}"
    with qcli.on_terminal(shell=command, columns=300) as terminal:
        terminal.expect(asked)
        terminal.type(b"\x04")  # end of input
        assert terminal.end() == 0
    note = f"Note: all messages go to the topic {topic}. To read the file {topic}: qcli pub TOPIC {topic}\r\n"
    assert terminal.shown.startswith(note.encode() + asked)
    with qcli.on_terminal("pub", topic, "-0") as terminal:
        terminal.expect(b"Reading messages from the terminal; Ctrl-D ends.\r\n")
    with qcli.on_terminal("pub", topic, "--quiet") as terminal:
        terminal.type(b"\x04")
        assert terminal.end() == 0
    assert b"Reading" not in terminal.shown
    with qcli.on_terminal(
        shell=f"cd {tmp_path} && echo a | {sys.executable} -m qcli pub {topic}"
    ) as terminal:
        assert terminal.end() == 0
    assert b"Reading" not in terminal.shown
    assert b"Note" not in terminal.shown


@pytest.mark.parametrize("command", ["pub", "tail"])
def test_http_port_as_tcp_address(qcli: Cli, command: str) -> None:
    result = qcli(command, "t", "--nsqd-tcp-address", qcli.http_address, stdin=b"a\n")
    assert result.code == 3
    assert result.err == (
        f"Error: {qcli.http_address} is not the TCP port of an NSQ broker, but the HTTP port of a broker, whose TCP "
        f"port is {qcli.tcp_address.rpartition(':')[2]}. See --nsqd-tcp-address.\n"
    )


def test_no_broker(nowhere: Cli) -> None:
    result = nowhere("pub", "clicks", stdin=b"a\n")
    assert result.code == 3
    assert result.err == (
        "Error: No broker answers at 127.0.0.1:1: connection refused. "
        "Start a broker with 'qcli serve', or use another address: --nsqd-tcp-address."
        " 'qcli stat --once --wait 10s' waits for a broker that is starting.\n"
    )


def test_killed_broker_is_reported_with_the_acknowledged_count(tmp_path: Path) -> None:
    with qcli_serve(tmp_path / "data") as broker:
        qcli = Cli(broker.tcp_address, broker.http_address)
        with qcli.running("tail", "t/c", "-n", "3") as tail, qcli.running("pub", "t", "--no-retry") as pub:
            pub.write(b"1\n2\n3\n")
            assert tail.end().out == b"1\n2\n3\n"
            broker.process.kill()
            broker.process.wait()
            pub.write(b"4\n")
            assert pub.process.wait(30) == 4
            report, error = pub.hear_line(), pub.hear_line()
            assert report.startswith("3 messages (3 B) published")
            assert error.startswith(f"Error: The connection to the broker at {broker.tcp_address} was lost (")
            assert "3 messages acknowledged" in error
            assert "Traceback" not in report + error


@pytest.mark.slow
def test_acknowledged_messages_survive_a_kill(tmp_path: Path) -> None:
    """After a kill under load, the broker has all acknowledged messages, and no more than may have been
    stored.
    """
    with (
        qcli_serve(tmp_path / "data") as broker,
        subprocess.Popen(["yes"], stdout=subprocess.PIPE) as endless,
    ):
        qcli = Cli(broker.tcp_address, broker.http_address)
        broker.create("t")
        with qcli.running("pub", "t", "--no-retry", stdin=endless.stdout) as pub:
            qcli.wait_until("t", lambda record: record["message_count"] >= 100_000)
            broker.process.kill()
            assert pub.process.wait(30) == 4
            pub.hear_line()
            error = pub.hear_line()
        endless.kill()
    told = re.search(r"([\d,]+) messages acknowledged(?:, up to ([\d,]+) more may have been stored)?", error)
    assert told is not None
    acknowledged, more = (int((number or "0").replace(",", "")) for number in told.groups())
    assert acknowledged >= 50_000
    with qcli_serve(tmp_path / "data") as broker:
        (record,) = Cli(broker.tcp_address, broker.http_address)("stat", "t", "--format", "json").records
    assert acknowledged <= record["depth"] <= acknowledged + more


def test_publish_to_nsqd(tmp_path: Path) -> None:
    with nsqd(tmp_path / "data") as broker:
        qcli = Cli(broker.tcp_address, broker.http_address)
        broker.create("t", "c")
        assert qcli("pub", "t", stdin=b"a\r\n\nb").code == 0
        assert sorted(qcli("tail", "t/c", "-n", "2").out.split(b"\n")) == [b"", b"a\r", b"b"]


def test_progress_only_on_a_terminal(qcli: Cli, topic: str, tmp_path: Path) -> None:
    (tmp_path / "lines").write_bytes(b"x\n" * 30)
    with qcli.on_terminal("pub", topic, "--rate", "40", str(tmp_path / "lines")) as terminal:
        code = terminal.end()
    assert code == 0
    assert b"30 messages (30 B) published" in terminal.shown
    assert re.search(rb"\d messages?, \d+ B, 0 s", re.sub(rb"\x1b\[[\d;]*m", b"", terminal.shown))
    assert terminal.shown.rindex(b"\x1b[?25h") > terminal.shown.rindex(
        b"\x1b[?25l"
    )  # the cursor is visible again
    with qcli.on_terminal("pub", topic, "--quiet", "--rate", "40", str(tmp_path / "lines")) as terminal:
        assert terminal.end() == 0
    assert terminal.shown == b""


@pytest.mark.parametrize("kind", ["files", "redirected", "pipe"])
def test_percent_and_time_left_of_files(qcli: Cli, topic: str, tmp_path: Path, kind: str) -> None:
    """Inputs of a known size: files, and standard input that is a file."""
    for number in range(2):
        (tmp_path / f"{number}").write_bytes(b"%099d\n" % number * 600)
    files = [str(tmp_path / f"{number}") for number in range(2)]
    line = f"cat {files[0]} {files[1]} | " if kind == "pipe" else ""
    line += f"{sys.executable} -m qcli pub {topic} --rate 100 "
    line += {"files": " ".join(files), "redirected": f"< {files[0]}", "pipe": ""}[kind]
    with qcli.on_terminal(shell=line) as terminal:
        terminal.expect(b"messages/s" if kind == "pipe" else b" left")
    shown = re.sub(rb"\x1b\[[\d;]*[a-zA-Z]", b"", terminal.shown)
    percents = [int(each) for each in re.findall(rb"(\d+)%, ", shown)]
    assert bool(percents) == (kind != "pipe")
    assert all(0 < each < 100 for each in percents)
    assert bool(re.search(rb" s, \d+ s left", shown)) == (kind != "pipe")


def test_strip_cr(qcli: Cli, topic: str, tmp_path: Path) -> None:
    (tmp_path / "lines").write_bytes(b"a\r\nb\rc\r\n\r\nd\r\r\ne\r")
    result = qcli("pub", topic, "--strip-cr", str(tmp_path / "lines"))
    assert result.code == 0
    assert "; 1 empty skipped" in result.err
    assert qcli("tail", f"{topic}/c", "-0", "-n", "4").out == b"a\0b\rc\0d\r\0e\0"


def test_strip_cr_is_for_lines(nowhere: Cli) -> None:
    for args in (["-0"], ["-d", ";"]):
        result = nowhere("pub", "t", "--strip-cr", *args)
        assert result.code == 2
        assert "--strip-cr is for lines: leave out --delimiter and --null." in result.err


def test_progress_does_not_disturb_interactive_input(qcli: Cli, topic: str) -> None:
    with qcli.on_terminal("pub", topic) as terminal, qcli.running("tail", f"{topic}/check") as tail:
        terminal.type(b"typed\n")
        assert tail.read_line() == b"typed\n"
        terminal.type(b"\x04")  # end of input
        assert terminal.end() == 0
    assert b"\x1b" not in terminal.shown


@only_ours
def test_full_topic(qcli: Cli, topic: str) -> None:
    qcli("topic", "create", topic)
    qcli("topic", "set", topic, "max_messages=3")
    assert qcli("pub", topic, stdin=b"1\n2\n").code == 0
    result = qcli("pub", topic, "-q", stdin=b"3\n4\n")
    assert result.code == 1
    assert result.err.startswith(f"Error: The broker at {qcli.tcp_address} refused: topic {topic} is full: ")
    assert result.err.endswith("; nothing of it was stored. 0 messages acknowledged, 2 more had been read.\n")


@pytest.mark.parametrize("args", [[], ["--no-retry"]])
def test_longer_delay_than_the_broker_allows(qcli: Cli, topic: str, args: list[str]) -> None:
    result = qcli("pub", topic, "-q", "--defer", "9000h", *args, stdin=b"1\n")
    assert result.code == 1
    limit = (
        r"(the maximum is (365d|1h) \(--max-defer of 'qcli serve', --max-req|see --max-defer of 'qcli serve')"
    )
    assert re.match(
        f"Error: The broker at {qcli.tcp_address} does not allow --defer 375d: {limit}", result.err
    )
    assert "0 messages acknowledged, 1 more had been read." in result.err
