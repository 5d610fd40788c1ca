"""Templates of URLs and headers: every value stays in its place."""

from urllib.parse import unquote_to_bytes, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_nsq.connectors.to_http.templates import (
    FIELDS,
    HeaderTemplate,
    TemplateError,
    UnsafeValue,
    URLTemplate,
    Values,
)

VALUES = Values("clicks", "archive", b"0cb2f1a3c9400001", 1795393750935605523, 2, b"a b")


def test_each_placeholder_of_a_url() -> None:
    template = URLTemplate(
        "http://h/{{topic}}/{{channel}}/{{id}}?t={{ timestamp }}&n={{timestamp_ns}}&a={{attempts}}&b={{body}}"
    )
    assert template.fields == set(FIELDS)
    assert template.render(VALUES) == (
        "http://h/clicks/archive/0cb2f1a3c9400001?t=2026-11-23T00%3A29%3A10.935605523Z"
        "&n=1795393750935605523&a=2&b=a%20b"
    )


def test_printf_as_nsq_to_http() -> None:
    """Go's url.QueryEscape: letters, digits and -_.~ stay, a blank becomes +."""
    template = URLTemplate("http://h/put?data=%s&x=%20", printf=True)
    assert template.render(Values("t", "c", body=b"a b+c/\xff~-_.&=\r\n")) == (
        "http://h/put?data=a+b%2Bc%2F%FF~-_.%26%3D%0D%0A&x=%20"
    )
    assert template.fields == {"body"}


def test_a_url_without_placeholders_is_not_changed() -> None:
    url = "https://user:p%20w@h:8443/a%2Fb?x=%7B1%7D&y"
    template = URLTemplate(url)
    assert template.render(VALUES) == "https://h:8443/a%2Fb?x=%7B1%7D&y"
    assert (template.userinfo, template.label) == ("user:p%20w", "https://h:8443/a%2Fb")


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("h/x", "must begin with http:// or https://"),
        ("ftp://h/x", "must begin with http:// or https://"),
        ("http:///x", "has no host"),
        ("http://user@/x", "has no host"),
        ("http://{{topic}}/x", "in the path and in the query only"),
        ("http://h/{{nothing}}", "{{nothing}} is no placeholder"),
        ("http://h/{{id}", "'{{id}' is no placeholder"),
        ("http://h/{{body.user}}", "is no placeholder"),
        ("http://h:99999/x", "no valid host and port"),
        ("http://h:0/x", "no valid host and port"),
        ("http://h:+80/x", "no valid host and port"),
        ("http://[::1/x", "no valid host and port"),
        ("http://[::g]/x", "no valid host and port"),
        ("http://a..b/x", "no valid host and port"),
        (f"http://{'a' * 64}.example/x", "no valid host and port"),
        ("http://h/a b", "blanks or control characters"),
        ("http://h/a\r\nX: y", "blanks or control characters"),
        ("http://h/%s", "write {{body}}"),
        ("http://h/a/../{{id}}", "must not be . or .."),
    ],
)
def test_invalid_urls(url: str, reason: str) -> None:
    with pytest.raises(TemplateError, match=r".") as failure:
        URLTemplate(url)
    assert reason in str(failure.value)


@pytest.mark.parametrize("host", ["h", "my_service:80", "[::1]:8080", "127.0.0.1", "a.b.", "\u00e9.example"])
def test_valid_hosts(host: str) -> None:
    assert URLTemplate(f"http://{host}/x").render(VALUES) == f"http://{host}/x"


@pytest.mark.parametrize(
    "url",
    [
        *("ftp://u:s3cret@h/", "http://u:s3cret@/", "http://u:s3cret@h:x/", "http://u:s3cret@h/%s"),
        *("http://u:s3cret@h/a b", "http://u:s3cret@h/a/../{{id}}", "http://u:s3cret@{{topic}}/"),
        *("http://u:s3/cret@h/", "u:s3cret@h"),
    ],
)
def test_errors_do_not_show_passwords(url: str) -> None:
    with pytest.raises(TemplateError) as failure:
        URLTemplate(url)
    assert "s3" not in str(failure.value)


def test_printf_stands_once() -> None:
    with pytest.raises(TemplateError, match="more than once"):
        URLTemplate("http://h/%s/%s", printf=True)


@pytest.mark.parametrize("body", [b".", b"..", b"../..", b"a/../b"])
@pytest.mark.parametrize(
    "url", ["http://h/a/{{body}}", "http://h/a/{{body}}/b", "http://h/a/{{body}}?x={{body}}"]
)
def test_dot_segments_are_refused_or_harmless(url: str, body: bytes) -> None:
    try:
        rendered = URLTemplate(url).render(Values("t", "c", body=body))
    except UnsafeValue:
        assert body in (b".", b"..")
    else:
        assert body not in (b".", b"..")
        assert len(urlsplit(rendered).path.split("/")) == url.partition("?")[0][8:].count("/") + 1


def test_a_dot_that_completes_a_segment_is_refused() -> None:
    with pytest.raises(UnsafeValue):
        URLTemplate("http://h/a/.{{body}}/b").render(Values("t", "c", body=b"."))


def test_dots_in_the_query_are_harmless() -> None:
    assert URLTemplate("http://h/a?x=/{{body}}/").render(Values("t", "c", body=b"..")) == "http://h/a?x=/../"


@given(st.binary(min_size=1))
def test_no_body_leaves_its_place_in_a_url(body: bytes) -> None:
    template = URLTemplate("http://h/a/{{body}}/b?x={{body}}&y=1")
    try:
        parts = urlsplit(template.render(Values("t", "c", body=body)))
    except UnsafeValue:
        assert body in (b".", b"..")
        return
    assert (parts.scheme, parts.netloc, parts.fragment) == ("http", "h", "")
    before, value, after = parts.path.removeprefix("/").split("/")
    assert (before, unquote_to_bytes(value), after) == ("a", body, "b")
    first, second = parts.query.split("&")
    assert (unquote_to_bytes(first), second) == (b"x=" + body, "y=1")


@given(st.binary(min_size=1))
def test_no_body_leaves_its_place_in_a_header(body: bytes) -> None:
    rendered = HeaderTemplate("<{{body}}>").render(Values("t", "c", body=body))
    assert all(0x20 <= byte < 0x7F for byte in rendered)
    assert unquote_to_bytes(rendered) == b"<" + body + b">"


def test_a_header_with_line_breaks_of_a_message() -> None:
    body = b"x\r\nX-Admin: yes\r\n\r\n"
    assert (
        HeaderTemplate("v={{body}}").render(Values("t", "c", body=body))
        == b"v=x%0D%0AX-Admin: yes%0D%0A%0D%0A"
    )


def test_blanks_at_the_ends_of_a_header_value_survive() -> None:
    assert HeaderTemplate("{{body}}").render(Values("t", "c", body=b"  a b ")) == b"%20%20a b%20"
    assert HeaderTemplate("{{body}}").render(Values("t", "c", body=b"   ")) == b"%20%20%20"


def test_a_fixed_header_is_not_changed() -> None:
    template = HeaderTemplate('Bearer 100% "ü"')
    assert template.render(VALUES) == 'Bearer 100% "ü"'.encode()
    assert template.fields == frozenset()


@pytest.mark.parametrize("text", ["a\r\nb", "a\nb", "a\x00b", "{{nothing}}", "{{id"])
def test_invalid_headers(text: str) -> None:
    with pytest.raises(TemplateError):
        HeaderTemplate(text)
