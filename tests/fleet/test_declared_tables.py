"""Which tables the settings of topics declare, on several brokers. No IO."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from soak import examples
from trio_nsq.fleet.allowed_tables import AllowedPlace
from trio_nsq.fleet.declared_tables import declared_tables
from trio_nsq.protocol.tables import DeclaredTable

A, B = DeclaredTable("delta", "/a"), DeclaredTable("delta", "/b")


def test_one_broker_declares_the_table_of_a_topic_for_all() -> None:
    """A broker that has created the topic later has no settings."""
    found = declared_tables(
        {"x": {"t": str(A), "u": ""}, "y": {"t": "", "v": str(B)}, "z": {"t": str(A)}}, {}
    )
    assert (found.tables, found.problems) == ({"t": A, "v": B}, {})


def test_brokers_that_differ_are_a_problem_of_the_topic_alone() -> None:
    found = declared_tables({"x": {"t": str(A), "u": "delta:/u"}, "y": {"t": str(B)}}, {"t": A})
    assert list(found.tables) == ["u"]
    assert found.problems == {
        "t": "t: its brokers declare different tables: delta:/a on x and delta:/b on y. Set the same one on all: "
        "qcli topic set t table=TABLE"
    }


def test_unknown_form() -> None:
    """Of a newer broker, or of a server that answers anything."""
    found = declared_tables({"x": {"t": "orc:/a"}}, {})
    assert found.tables == {}
    assert "t: the table 'orc:/a' cannot be used: it must be delta:URL" in found.problems["t"]


@pytest.mark.parametrize(
    ("current", "written"), [({}, set()), ({"t": A}, {"t"}), ({"u": A}, {"u"}), ({"t": B}, set())]
)
def test_topics_with_the_same_table(current: dict[str, DeclaredTable], written: set[str]) -> None:
    found = declared_tables({"x": {"t": str(A), "u": str(A)}}, current)
    assert found.tables.keys() == written
    assert found.problems.keys() == {"t", "u"} - written
    for topic, text in found.problems.items():
        assert text.startswith(f"{topic}: its table delta:/a is that of {'u' if topic == 't' else 't'}, too.")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("/a", "/a/"),
        ("/a", "//a"),
        ("/a/b", "/a//b/."),
        ("/a/b", "/a/c/../b"),
        ("/a/b", "file:///a/b"),
        ("/a/b", "file:///a/%62"),
        ("s3://lake/a", "S3://lake/a/"),
        ("s3://lake/a", "s3://lake//a"),
        ("s3://lake/a/b", "s3a://lake/a//b"),
        ("gs://lake/a", "gcs://lake/a"),
    ],
)
def test_another_name_makes_no_other_table(one: str, other: str) -> None:
    found = declared_tables(
        {"x": {"t": f"delta:{one}", "u": f"delta:{other}"}}, {"t": DeclaredTable("delta", one)}
    )
    assert found.tables == {"t": DeclaredTable("delta", one)}
    assert found.problems["u"].startswith(f"u: its table delta:{other} is that of t, too.")


def test_tables_of_two_formats_have_two_folders() -> None:
    """Readers of the folder of files would read the rows of both topics."""
    tables = {"t": "delta:/a", "u": "parquet:file:///a/"}
    found = declared_tables({"x": tables}, {"t": A})
    assert found.tables == {"t": A}
    assert found.problems["u"].startswith("u: its table parquet:file:///a/ has the folder of t, too.")
    assert declared_tables({"x": tables}, {}).tables == {}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("delta:/a", "delta:/A"),
        ("delta:/a", "delta:/a/b"),
        ("delta:/s3/a", "delta:s3://s3/a"),
        ("delta:s3://a/b", "delta:gs://a/b"),
        ("delta:abfss://a@x/b", "delta:abfss://b@x/b"),
        ("iceberg:prod/a.b", "iceberg:prod/a.c"),
        ("iceberg:file/a.b", "delta:/a/b"),
    ],
)
def test_different_tables(one: str, other: str) -> None:
    assert len(declared_tables({"x": {"t": one, "u": other}}, {}).tables) == 2


@pytest.mark.parametrize(
    ("places", "tables", "others"),
    [
        (
            ["/lake"],
            [
                "delta:/lake",
                "delta:/lake/clicks",
                "parquet:/lake/a/b/",
                "delta:file:///lake/x",
                "delta:/lake//y",
            ],
            [
                "delta:/lakes",
                "delta:/",
                "delta:/lake/../etc",
                "delta:file:///lake/../etc",
                "iceberg:lake/a.b",
            ],
        ),
        (
            ["delta:s3://lake/tables/"],
            ["delta:s3://lake/tables", "delta:s3://lake/tables/a/b", "delta:S3://lake/tables/a"],
            [
                "parquet:s3://lake/tables/a",
                "delta:s3://lake/tables2",
                "delta:s3://lake/tables/../a",
                "delta:s3://lake",
                "delta:gs://lake/tables/a",
                "delta:/lake/tables/a",
                "iceberg:s3/lake.tables",
            ],
        ),
        (["iceberg:prod"], ["iceberg:prod/a.b"], ["iceberg:production/a.b", "delta:/prod"]),
        (
            ["iceberg:prod/events."],
            ["iceberg:prod/events.b"],
            ["iceberg:prod/eventslog.b", "iceberg:test/events.b"],
        ),
        (["iceberg:prod/a.b"], ["iceberg:prod/a.b"], ["iceberg:prod/a.c"]),
        (["./lake"], ["delta:/home/ann/lake/x"], ["delta:/lake/x"]),
        (["../bob", "/x"], ["delta:/home/bob/x", "parquet:/x/y"], ["delta:/home/ann/x"]),
        (["/"], ["delta:/any"], ["delta:s3://any/x"]),
        (["s3a://lake//tables"], ["delta:s3://lake/tables/a"], ["delta:s3://lake/tables/%2E%2e/a"]),
        (
            ["abfss://tables@account.dfs.core.windows.net"],
            ["delta:abfss://tables@account.dfs.core.windows.net/a"],
            ["delta:abfss://leases@account.dfs.core.windows.net/a", "delta:abfss://tables/a"],
        ),
        (["s3://lake"], ["delta:s3://lake/a"], ["delta:s3://key@lake/a"]),
        ([], ["delta:/any", "iceberg:a/b.c"], []),
    ],
)
def test_allowed_places(places: list[str], tables: list[str], others: list[str]) -> None:
    """A place has what is below it, not what begins with its name."""
    allowed = [AllowedPlace.parse(each, Path("/home/ann")) for each in places]
    settings = {f"t{number}": text for number, text in enumerate([*tables, *others])}
    found = declared_tables({"x": settings}, {}, allowed)
    assert [str(table) for table in found.tables.values()] == tables
    assert len(found.problems) == len(others)
    for topic, text in found.problems.items():
        assert f"{topic}: its table {settings[topic]} is in no place of --allow-table" in text


@pytest.mark.parametrize(
    "text", ["", "delta:", "s3://", "s3:lake", "iceberg:", "iceberg:/a", "iceberg:a/b..c", "s3://a/../b"]
)
def test_places_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a folder|is not iceberg:|is empty|lacks two slashes"):
        AllowedPlace.parse(text, Path("/home/ann"))


@pytest.mark.parametrize(
    "text",
    [
        "s3://key@lake/x",
        "delta:s3://key:hidden@lake/x",
        "s3://lake?endpoint_override=h&secret=hidden",
        "s3://k:hid/den@lake",
    ],
)
def test_places_with_what_no_table_has(text: str) -> None:
    """They would allow nothing."""
    with pytest.raises(ValueError, match="has no user, no secret and no options") as caught:
        AllowedPlace.parse(text, Path("/"))
    assert "hid" not in str(caught.value)


_NAMES = st.lists(st.sampled_from(["a", "b", "..", ""]), max_size=4).map("/".join)


@settings(max_examples=examples(200), deadline=None)
@given(st.sampled_from(["/", "file:///", "s3://lake/", "s3a://lake//"]), _NAMES, _NAMES)
def test_another_name_of_an_allowed_table_is_allowed(scheme: str, place: str, below: str) -> None:
    """The rule for places and the rule for two topics with one table see the same parts."""
    table = DeclaredTable("delta", f"{scheme}{place}/{below}")
    other = DeclaredTable(
        "delta", scheme.replace("s3:", "s3a:").replace("file://", "") + f"{place}//{below}/"
    )
    try:
        allowed = [AllowedPlace.parse(f"{scheme}{place}", Path("/"))]
    except ValueError:
        return
    found = declared_tables({"x": {"t": str(table), "u": str(other)}}, {"t": table}, allowed)
    if found.tables:
        assert found.problems["u"].startswith(f"u: its table {other} is that of t, too.")
        assert ".." not in str(table).split("/")
    else:
        assert ".." in str(table).split("/")
