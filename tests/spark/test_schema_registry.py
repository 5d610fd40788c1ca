"""Tests for the client of schema registries: which answers it takes, which it retries, and what it says of others."""

import base64
from typing import Any

import pytest

from spark.registries import ScriptedRegistry
from trio_nsq.access.secret import Secret
from trio_nsq.bodies.errors import RegistryError, RegistryUnavailable, SchemaNotFound
from trio_nsq.bodies.registry import (
    LIKELY_IDS,
    MAX_UNKNOWN_ASKED,
    UNKNOWN_ASKED_S,
    UNKNOWN_S,
    RegistryAccess,
    SchemaRegistry,
)


def registry_of(scripted: ScriptedRegistry, patience_s: float = 0.0, url: str = "") -> SchemaRegistry:
    return SchemaRegistry(RegistryAccess(url or scripted.url, patience_s=patience_s))


def test_schema_is_asked_for_once(scripted: ScriptedRegistry) -> None:
    scripted.add(5, "text", "PROTOBUF", subject="a/b c")
    scripted.answers["/subjects/a%2Fb%20c/versions/latest"] = scripted.answers.pop(
        "/subjects/a/b c/versions/latest"
    )
    registry = registry_of(scripted)
    assert registry.latest("a/b c") == registry.schema(5)
    found = registry.schema(5)
    assert (found.id, found.kind, found.text, found.references) == (5, "PROTOBUF", "text", {})
    assert [path for path, _ in scripted.requests] == ["/subjects/a%2Fb%20c/versions/latest"]


def test_kind_is_avro_unless_the_answer_says_otherwise(scripted: ScriptedRegistry) -> None:
    scripted.answers["/schemas/ids/1"] = 200, {"schema": '"int"'}
    assert registry_of(scripted).schema(1).kind == "AVRO"


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_busy_registry_is_asked_again(scripted: ScriptedRegistry, status: int) -> None:
    scripted.add(1, "text")
    scripted.before = lambda path: (status, {"message": "busy"}) if len(scripted.requests) < 3 else None
    assert registry_of(scripted, patience_s=30.0).schema(1).text == "text"
    assert len(scripted.requests) == 3
    scripted.before = lambda path: (status, {"message": "still  busy"})
    with pytest.raises(RegistryUnavailable, match=f"answers with status {status}: still busy"):
        registry_of(scripted).schema(1)


def test_registry_that_is_down() -> None:
    with pytest.raises(RegistryUnavailable, match=r"http://127.0.0.1:1 does not answer: Connection refused"):
        SchemaRegistry(RegistryAccess("http://127.0.0.1:1", patience_s=0.0)).schema(1)


@pytest.mark.parametrize("code", [40401, 40402, 40403])
def test_missing_schema(scripted: ScriptedRegistry, code: int) -> None:
    scripted.before = lambda path: (404, {"error_code": code, "message": "no"})
    with pytest.raises(SchemaNotFound, match="has no /subjects/s/versions/latest: no"):
        registry_of(scripted).latest("s")


@pytest.mark.parametrize(
    ("status", "answer", "said"),
    [
        (404, {}, "it is not the URL of a schema registry"),
        (404, b"<html>", "it is not the URL of a schema registry"),
        (401, {"message": "who?"}, "refuses access"),
        (403, {}, "--registry-secret-file"),
        (422, {"message": "invalid"}, "refused /schemas/ids/1 (status 422): invalid"),
        (301, {}, "status 301"),
        (200, b"<html>", "it is not a JSON object"),
        (200, [], "it is not a JSON object"),
        (200, {"id": 1}, "it has no schema"),
        (200, {"schema": 5}, "it has no schema"),
        (200, {"schema": "x", "references": [{"name": "a"}]}, "a reference without name, subject or version"),
        (200, {"schema": "x", "references": 5}, "its references are no list"),
    ],
)
def test_answers_that_no_registry_gives_are_told_and_not_retried(
    scripted: ScriptedRegistry, status: int, answer: Any, said: str
) -> None:
    scripted.before = lambda path: (status, answer)
    with pytest.raises(RegistryError) as caught:
        registry_of(scripted, patience_s=30.0).schema(1)
    assert said in str(caught.value)
    assert not isinstance(caught.value, RegistryUnavailable | SchemaNotFound)
    assert [path for path, _ in scripted.requests] == ["/schemas/ids/1", "/schemas/types"][
        : 1 + (status == 404)
    ]


@pytest.mark.parametrize("answer", [{}, {"error_code": 404, "message": "HTTP 404 Not Found"}, b"<html>"])
def test_unknown_id_without_the_code_of_a_registry(scripted: ScriptedRegistry, answer: Any) -> None:
    scripted.answers["/schemas/types"] = 200, ["JSON", "AVRO"]
    scripted.before = lambda path: (404, answer) if path.startswith("/schemas/ids/") else None
    registry = registry_of(scripted)
    for number in 1, 2:
        with pytest.raises(SchemaNotFound, match=f"has no /schemas/ids/{number}: "):
            registry.schema(number)
    assert [path for path, _ in scripted.requests].count("/schemas/types") == 1


def test_registry_that_has_answered_is_one(scripted: ScriptedRegistry) -> None:
    scripted.add(1, "text", subject="s")
    registry = registry_of(scripted)
    registry.latest("s")
    scripted.before = lambda path: (404, {})
    with pytest.raises(SchemaNotFound):
        registry.schema(2)
    assert len(scripted.requests) == 2


def test_unknown_id_is_asked_for_again_after_some_minutes(scripted: ScriptedRegistry) -> None:
    now = [0.0]
    registry = SchemaRegistry(RegistryAccess(scripted.url, patience_s=0.0), clock=lambda: now[0])
    for now[0] in 0.0, 1.0, UNKNOWN_S - 1:
        with pytest.raises(SchemaNotFound, match="has no /schemas/ids/7: Schema not found"):
            registry.schema(7)
    assert len(scripted.requests) == 1
    scripted.add(7, "text")
    now[0] = UNKNOWN_S
    assert registry.schema(7).text == "text"
    assert len(scripted.requests) == 2


def test_bodies_with_random_ids_take_a_limited_memory(scripted: ScriptedRegistry) -> None:
    scripted.answers["/schemas/types"] = 200, []
    access = RegistryAccess(scripted.url, patience_s=0.0)
    registry = SchemaRegistry(access, clock=lambda: 0.0, max_unknown=2)
    for number in 1, 2, 3, 2, 3, 1:
        with pytest.raises(SchemaNotFound):
            registry.schema(number)
    asked = [path for path, _ in scripted.requests]
    assert asked == [f"/schemas/ids/{number}" for number in (1, 2, 3, 1)]


def test_flood_of_unknown_ids_is_not_a_flood_of_requests(scripted: ScriptedRegistry) -> None:
    """Ids that are known are found meanwhile, and others are asked for again after a minute."""
    now = [0.0]
    registry = SchemaRegistry(RegistryAccess(scripted.url, patience_s=0.0), clock=lambda: now[0])
    scripted.add(1, "text")
    registry.schema(1)
    far = 2 + LIKELY_IDS
    for number in range(far, far + 1000):
        with pytest.raises(SchemaNotFound):
            registry.schema(number)
    assert len(scripted.requests) == 1 + MAX_UNKNOWN_ASKED
    assert registry.schema(1).text == "text"
    scripted.add(far + 5000, "new")
    with pytest.raises(SchemaNotFound, match=f"is not asked for /schemas/ids/{far + 5000}"):
        registry.schema(far + 5000)
    now[0] = UNKNOWN_ASKED_S
    assert registry.schema(far + 5000).text == "new"


@pytest.mark.parametrize("known", [None, 1])
def test_flood_of_unknown_ids_hides_no_schema(scripted: ScriptedRegistry, known: int | None) -> None:
    """Bodies of a schema that this process has not asked for yet are valid: its first bodies, or those of a new one."""
    scripted.answers["/schemas/types"] = 200, []
    registry = SchemaRegistry(RegistryAccess(scripted.url, patience_s=0.0), clock=lambda: 0.0)
    if known is not None:
        scripted.add(known, "text")
        registry.schema(known)
    far = 2 + LIKELY_IDS
    for number in range(far, far + MAX_UNKNOWN_ASKED):
        with pytest.raises(SchemaNotFound):
            registry.schema(number)
    scripted.add(LIKELY_IDS, "new")
    assert registry.schema(LIKELY_IDS).text == "new"


def test_reference_to_itself_ends(scripted: ScriptedRegistry) -> None:
    itself = [{"name": "a", "subject": "s", "version": 1}]
    scripted.add(1, "text", references=itself)
    scripted.answers["/subjects/s/versions/1"] = 200, {"schema": "text", "references": itself}
    with pytest.raises(RegistryError, match="too many references"):
        registry_of(scripted).schema(1)


@pytest.mark.parametrize(
    ("secret", "sent"),
    [
        ("user:pass:word", f"Basic {base64.b64encode(b'user:pass:word').decode()}"),
        ("to.ken-1", "Bearer to.ken-1"),
    ],
)
def test_secret(scripted: ScriptedRegistry, secret: str, sent: str) -> None:
    scripted.add(1, "text")
    access = RegistryAccess(scripted.url, Secret(secret))
    assert secret not in repr(access)
    SchemaRegistry(access).schema(1)
    assert scripted.requests[0][1] == sent


def test_user_of_the_url_is_sent_and_not_shown(scripted: ScriptedRegistry) -> None:
    url = scripted.url.replace("://", "://me:secret@")
    scripted.before = lambda path: (422, {})
    with pytest.raises(RegistryError) as caught:
        registry_of(scripted, url=url).schema(1)
    assert "me:secret" not in str(caught.value) + repr(RegistryAccess(url))
    assert scripted.requests[0][1] == f"Basic {base64.b64encode(b'me:secret').decode()}"
