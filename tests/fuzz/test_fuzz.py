"""Run every target for a short time, and check that the fuzzer finds faults."""

from pathlib import Path
from random import Random

import pytest

from fuzz.broker import BrokerFailed, broker_to_fuzz, check_frames, check_responses, fuzz
from fuzz.commands import Commands
from fuzz.engine import Target, make, run, try_input
from fuzz.protocol import TARGETS, main
from soak import examples
from trio_nsq.protocol.command_reader import CommandReader
from trio_nsq.protocol.frames import encode_error

INPUTS = examples(1500)
SEED = 20


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_short_run(target: Target) -> None:
    failure = run(target, SEED, range(INPUTS))
    assert failure is None, (
        f"python -m fuzz.protocol --seed {SEED} --target {target.name} --input {failure.number}"
    )


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_input_depends_on_number_and_seed_only(target: Target) -> None:
    assert make(target, 1, 5)[0] == make(target, 1, 5)[0]
    inputs = {make(target, seed, number)[0] for seed in (1, 2) for number in range(100)}
    assert len(inputs) > 150


class Wrong(Commands):
    """A target with a fault."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def check(self, data: bytes, rng: Random) -> None:
        match self.fault:
            case "error" if b"\xff" in data:
                raise KeyError("an error that is not documented")
            case "loop" if b"\xff" in data:
                while True:
                    pass

    def read(self, data: bytes) -> None:
        if self.fault == "memory":
            bytes(len(data) * 1000 + 1_000_000)


def test_unexpected_error_is_found() -> None:
    failure = run(Wrong("error"), SEED, range(INPUTS))
    assert failure is not None
    assert "KeyError" in failure.reason
    assert b"\xff" in failure.data


def test_too_much_memory_is_found() -> None:
    failure = try_input(Wrong("memory"), SEED, 0, measured=True)
    assert failure is not None
    assert "bytes of memory" in failure.reason


def test_endless_loop_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuzz.engine.LONGEST_S", 1)
    failure = run(Wrong("loop"), SEED, range(INPUTS))
    assert failure is not None
    assert "not done within 1 s" in failure.reason


def test_reader_that_loses_a_byte_between_reads_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    receive_data = CommandReader.receive_data

    def lossy(self: CommandReader, data: bytes) -> None:
        receive_data(self, data[:-1] if data.endswith(b"\r") else data)

    monkeypatch.setattr(CommandReader, "receive_data", lossy)
    failure = run(Commands(), SEED, range(INPUTS))
    assert failure is not None
    assert "in pieces of" in failure.reason


def test_short_run_with_a_broker(tmp_path: Path) -> None:
    with broker_to_fuzz(tmp_path) as broker:
        sent, most_bytes = fuzz(broker, SEED, inputs=500, seconds=None)
    assert sent == 500
    assert most_bytes > 0


def test_invalid_answer_is_found() -> None:
    with pytest.raises(BrokerFailed, match="half a frame"):
        check_frames(b"\0\0\0\x06\0\0\0\0O")
    with pytest.raises(BrokerFailed, match="the error E_NEW it"):
        check_frames(encode_error(b"E_NEW it"))
    with pytest.raises(BrokerFailed, match="status 500"):
        check_responses(b"HTTP/1.1 500 Internal Server Error\r\n\r\n")
    with pytest.raises(BrokerFailed, match="no response"):
        check_responses(b"OK")


def test_command_line_prints_how_to_reproduce_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(TARGETS, "commands", Wrong("error"))
    assert main(["--target", "commands", "--inputs", "3000", "--seed", "9"]) == 1
    said = capsys.readouterr().err
    again = said.partition("again: python -m fuzz.protocol ")[2].split()
    assert main(again) == 1
    assert "KeyError" in capsys.readouterr().err


def test_command_line_runs_the_given_targets(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--target", "frames", "--inputs", "1500"]) == 0
    assert "1,500 inputs with seed 1" in capsys.readouterr().out
    assert main(["--target", "frames", "--seed", "9", "--input", "3"]) == 0
    assert "frames: input 3 of seed 9 is fine: b" in capsys.readouterr().out
