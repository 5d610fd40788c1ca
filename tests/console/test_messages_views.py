"""Bodies as HTML: JSON, text and hex; never more HTML than allowed, never HTML of the body's own."""

import json
import random
from html import unescape

import pytest

from console.message_support import PageText
from trio_nsq.console.messages.body_view import SHOWN_BYTES, body_view, preview

LIMIT = 20_000


def text_of(html: str) -> str:
    """Return the text of HTML, which must be balanced, without the counts of folded values."""
    return PageText(html).text


def test_json_is_folded_and_coloured_and_its_text_is_unchanged() -> None:
    body = b'{"n": 12345678901234567890.1230, "big": 1e999, "n": NaN, "s": "a\\u003cb", "list": [true, null, {}]}'
    view = body_view(body, len(body))
    assert view.kind == "json"
    assert (view.shown, view.size) == (len(body), len(body))
    html = str(view.html)
    assert '<span class="n">12345678901234567890.1230</span>' in html
    assert '<span class="n">1e999</span>' in html
    assert '<span class="l">NaN</span>' in html
    assert html.count("&#34;n&#34;") == 2  # names may repeat
    assert "&#34;a\\u003cb&#34;" in html
    assert html.count("<details") == 3
    assert '<span class="c">5</span>' in html
    text_of(html)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1,",
        b'{"a":1,}',
        b"[01]",
        b'{"a" 1}',
        b"[1] x",
        b'["a long text \x01"]',
        b'["\\x"]',
        b"{'a':1}",
        b"42",
    ],
)
def test_what_is_no_json_object_or_array_is_text(body: bytes) -> None:
    assert body_view(body, len(body)).kind in ("text", "empty")


def test_json_agrees_with_the_standard_library() -> None:
    generator = random.Random(7)
    parts = ["{", "}", "[", "]", ",", ":", '"a"', "1", "-2.5e3", "true", " ", '"', "x"]
    kinds = set()
    for _ in range(20_000):
        text = "".join(generator.choice(parts) for _ in range(generator.randrange(1, 12)))
        try:
            is_json = isinstance(json.loads(text), dict | list)
        except ValueError:
            is_json = False
        view = body_view(text.encode(), len(text))
        assert (view.kind == "json") == is_json, text
        text_of(str(view.html))
        kinds.add(view.kind)
    assert kinds == {"json", "text"}


@pytest.mark.parametrize("cut", range(1, 40))
def test_json_that_is_cut_anywhere_is_still_json(cut: int) -> None:
    body = b'{"a":[1,{"b":"xyz"},true],"c":-1.5e10,"d":{}}'
    view = body_view(body[:cut], len(body))
    assert view.kind == "json"
    assert view.is_cut
    assert "…" in text_of(str(view.html))


MIB = 1024 * 1024
LARGE = {
    "one line": b"x" * MIB,
    "open brackets": b"[" * MIB,
    "nested": b"[" * 200_000 + b"]" * 200_000,
    "nested objects": b'{"a":' * 200_000,
    "many members": b"[1" + b",1" * 500_000 + b"]",
    "long string": b'{"a":"' + b"x" * MIB + b'"}',
    "string of overrides": b'{"a":"' + "\u202e".encode() * 300_000 + b'"}',
    "overrides": "\u202e".encode() * 300_000,
    "markup": b"<" * MIB,
    "long number": b"[" + b"9" * MIB + b"]",
    "spaces": b"[" + b" " * MIB + b"]",
    "zeros": bytes(MIB),
    "not UTF-8": b"\xff" * MIB,
    "accents": "é".encode() * 500_000,
    "quotes": b'["' + b'\\"' * 500_000,
}


@pytest.mark.parametrize("name", LARGE)
def test_large_bodies_make_bounded_pages(name: str) -> None:
    body = LARGE[name]
    view = body_view(body, len(body), limit=LIMIT)
    assert len(view.html) < LIMIT + 5000
    assert view.is_cut
    assert 0 < view.shown <= SHOWN_BYTES
    text_of(str(view.html))


def test_markup_is_text() -> None:
    attack = "</pre><script>alert(1)</script><img src=x onerror=alert(1)>\"'&lt;"
    for body in (attack, json.dumps({attack: [attack]})):
        found = PageText(str(body_view(body.encode(), len(body.encode())).html))
        assert not {"script", "img", "pre"} & set(found.tags)
    assert unescape(str(body_view(attack.encode(), len(attack)).html)) == attack


def test_invisible_characters_are_shown() -> None:
    text = "a\u202eb\u200bc\x1b[31m\x00\u2028\ufeff\r\n\tend with a few words so that it counts as text"
    html = str(body_view(text.encode(), len(text.encode())).html)
    for escape, name in (
        ("\\u202e", "RIGHT-TO-LEFT OVERRIDE"),
        ("\\u200b", "ZERO WIDTH SPACE"),
        ("\\x1b", "control character"),
        ("\\x00", "control character"),
        ("\\u2028", "LINE SEPARATOR"),
        ("\\ufeff", "ZERO WIDTH NO-BREAK SPACE"),
        ("\\r", "control character"),
    ):
        assert f'{name}">{escape}</span>' in html
    assert html.endswith("\n\tend with a few words so that it counts as text")
    assert not any(char in html for char in "\u202e\u200b\x1b\x00\u2028\ufeff\r")


def test_other_scripts_stay_readable() -> None:
    text = "שלום · привет · 你好 · é"
    assert str(body_view(text.encode(), len(text.encode())).html) == text


def test_binary_is_a_hex_dump() -> None:
    body = b"\xff\xfe<b>\x00abc 0123456789"
    view = body_view(body, len(body))
    assert view.kind == "hex"
    assert unescape(str(view.html)).splitlines() == [
        "00000000  ff fe 3c 62 3e 00 61 62  63 20 30 31 32 33 34 35  ..<b>.abc 012345",
        "00000010  36 37 38 39                                       6789",
    ]
    assert body_view(bytes(100), 100).kind == "hex"  # valid UTF-8, but no text


def test_a_character_that_the_cut_splits_does_not_make_a_text_binary() -> None:
    body = ("é" * SHOWN_BYTES).encode()
    for end in (SHOWN_BYTES - 1, SHOWN_BYTES):
        view = body_view(b"a" + body[:end], 1 + len(body))
        assert view.kind == "text"


def test_another_view_is_used_if_the_body_allows_it() -> None:
    assert body_view(b"[1]", 3, "text").kind == "text"
    assert body_view(b"[1]", 3, "hex").kind == "hex"
    assert body_view(b"\xff", 1, "json").kind == "hex"
    assert body_view(b"x", 1, "json").kind == "text"


def test_a_preview_is_one_short_line() -> None:
    assert preview(b'{"a":\n1}', 100) == '{"a":\\n1}'
    assert preview(b"\xff\x00", 100) == "ff 00"
    assert preview(b"x" * 1000, 10) == "x" * 10 + "…"
    assert len(preview("\u202e".encode() * 1000, 50)) == 51
