"""Tests for the configuration file of `qcli to-parquet`."""

from pathlib import Path

import pytest

from cli.support import Cli, Result
from spark.support import ToParquet, column, numbers, parquet_files, run_in_process, until


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "pipeline.toml"
    path.write_text(text)
    return path


def refusal(tmp_path: Path, text: str, *args: str) -> str:
    """Return the error of a file, without its beginning."""
    path = written(tmp_path, text)
    found = run_in_process(
        Cli("", "127.0.0.1:1"), "to-parquet", "--config", str(path), "--check-config", *args
    )
    assert found.code == 2, found
    start = f"Error: --config: {path}: "
    assert start in found.err, found.err
    return found.err.partition(start)[2].rstrip("\n")


def test_sections(qcli: Cli, topic: str, tmp_path: Path, to_parquet: ToParquet) -> None:
    """A section is named after its topic; the section that names a topic has it, then the first pattern."""
    for name in ("named", "a.x", "a.y", "b", "c"):
        qcli.publish(f"{topic}-{name}", [b'{"n": %d}' % number for number in range(5)])
    path = written(
        tmp_path,
        f"""
        partition-by = "none"
        folder = "{tmp_path}/all"

        [everything]
        topic-pattern = "^{topic}-"
        text = true

        [{topic}-named]
        folder = "{tmp_path}/own"
        json = true
        columns = ["n:double"]
        partition-by = "hour"

        [more]
        topics = ["{topic}-b"]
        folder = "{tmp_path}/of-{{topic}}/v1"

        [{topic}-c]
        """,
    )
    found = to_parquet("--config", path, "--format", "json")
    assert found.code == 0, found.err
    assert {each["topic"].partition("-")[2]: each["folder"] for each in found.records} == {
        "named": f"{tmp_path}/own",
        "a.x": f"{tmp_path}/all/{topic}-a.x",
        "a.y": f"{tmp_path}/all/{topic}-a.y",
        "b": f"{tmp_path}/of-{topic}-b/v1",
        "c": f"{tmp_path}/all/{topic}-c",
    }
    assert column(tmp_path / "own", "n") == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert parquet_files(tmp_path / "own")[0].startswith("date=")
    assert column(tmp_path / "all" / f"{topic}-a.x", "body") == [f'{{"n": {number}}}' for number in range(5)]
    assert column(tmp_path / f"of-{topic}-b" / "v1", "body")[0] == b'{"n": 0}'


def test_a_file_that_follows(qcli: Cli, topic: str, tmp_path: Path) -> None:
    path = written(
        tmp_path,
        f"""
        follow = true
        every = "50ms"
        topic-refresh = "50ms"

        [later]
        topic-pattern = "^{topic}$"
        folder = "{tmp_path}/f"
        channel = "lake"
        """,
    )
    with qcli.running("to-parquet", "--config", str(path)) as running:
        qcli.publish(topic, numbers(8))
        until(lambda: len(parquet_files(tmp_path / "f" / topic)) > 0)
        running.process.terminate()
        assert running.end().code == 143
    assert column(tmp_path / "f" / topic, "seq") == list(range(8))


def lines_of(path: Path, *args: str) -> Result:
    return Cli("", "")("to-parquet", "--config", str(path), "--check-config", *args)


def test_check_shows_the_command_lines(tmp_path: Path) -> None:
    """The command line wins over a section, and this over what is above; addresses of all kinds are replaced."""
    path = written(
        tmp_path,
        """
        lookupd-http-address = ["a:1", "b:2"]
        every = "5m"
        follow = true
        auth-secret = "hidden"
        compression = "gzip"

        [clicks]
        folder = "x y"
        compression = "none"
        target-file-size = 100000

        [orders]
        folder = "orders"
        from-segments = "x=s3://key:a/b@old"
        body-format = "avro"
        registry = "https://token@reg"
        compact = false
        """,
    )
    common = "--every=5m --follow '--auth-secret=***'"
    assert lines_of(path).out.decode().splitlines() == [
        f"[clicks] qcli to-parquet clicks 'x y' --lookupd-http-address=a:1 --lookupd-http-address=b:2 {common} "
        "--compression=none --target-file-size=100000",
        f"[orders] qcli to-parquet orders orders {common} --compression=gzip --from-segments=x=s3://xxxxx@old "
        "--body-format=avro --registry=https://xxxxx@reg",
    ]
    found = lines_of(path, "--from-segments", "new", "--every", "1m").out.decode().splitlines()
    assert found[1] == (
        "[orders] qcli to-parquet orders orders --every=1m --follow '--auth-secret=***' --compression=gzip "
        "--body-format=avro --registry=https://xxxxx@reg --from-segments=new"
    )


def test_false_wins_over_true_above(tmp_path: Path) -> None:
    path = written(tmp_path, 'folder = "f"\njson = true\n[a]\n[b]\njson = false')
    lines = ["[a] qcli to-parquet a f --json", "[b] qcli to-parquet b f"]
    assert lines_of(path).out.decode().splitlines() == lines


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('folder = "f"\n[a]\njsn = true', "[a]: jsn: there is no such key. Did you mean json?"),
        ('folder = "f"\n[a]\njson = "yes"', '[a]: json: "yes" is not true or false.'),
        (
            'folder = "f"\n[a]\npartition-by = "week"',
            "[a]: --partition-by and --event-time take fields of bodies",
        ),
        ('folder = "f"\n[a]\nbody-format = "week"', "[a]: body-format: 'week' is not one of"),
        ('folder = "f"\n[a]\ntopic-pattern = "("', "[a]: topic-pattern: '(' is not a regular expression"),
        (
            'folder = "f"\n[a]\nevery = "1m"',
            "[a]: every: it is for all sections: write it above the first one.",
        ),
        ('folder = "f"\n[a]\ncolumns = [{}]', "[a]: columns: {} is neither a text nor a number."),
        ('folder = "f"\n[a]\ntext = true\njson = true', "[a]: --text and --json exclude each other."),
        ('folder = "f"\nevery = "soon"\n[a]', "every: 'soon' is not a duration"),
        ('folder = "f"\nevery = "1m"\n[a]', "[a]: --every is for --follow"),
        ('topics = ["a"]\nfolder = "f"\n[a]', "topics: there is no such key."),
        ('consume = true\nfolder = "f"\n[a]', "consume: there is no such key."),
        (
            '[a]\nfolder = "f"\n[b]\nfolder = "f"\ntopics = ["a"]',
            "[b]: the topic a is in the section [a], too.",
        ),
        ("[a]", "[a]: folder: it is missing."),
        ('folder = "f"\n["a b"]', "[a b]: this is no name of a topic: give topics or topic-pattern."),
        (
            'folder = "f"\niceberg = "c/n.t"\n[a]\n[b]',
            "[a]: --iceberg is that of several sections, so it needs {topic}.",
        ),
    ],
)
def test_wrong_files(tmp_path: Path, text: str, expected: str) -> None:
    assert refusal(tmp_path, text).startswith(expected)


def test_wrong_command_lines(tmp_path: Path, to_parquet: ToParquet) -> None:
    path = written(tmp_path, 'folder = "f"\n[a]')
    found = to_parquet("--config", path, "a", "f")
    assert (found.code, found.err) == (2, "Error: --config has the topics and the folders: leave them out.\n")
    found = to_parquet("--check-config", "a", "f")
    assert (found.code, "--check-config is for --config" in found.err) == (2, True)
    found = to_parquet("--config", tmp_path / "missing.toml")
    assert (found.code, "cannot read" in found.err) == (1, True)
    for text, reason in (("=", "is not valid TOML"), ('folder = "f"', "has no section")):
        found = to_parquet("--config", written(tmp_path, text))
        assert (found.code, reason in found.err) == (2, True)
    found = to_parquet("clicks")
    assert (found.code, "Missing argument" in found.err) == (2, True)
