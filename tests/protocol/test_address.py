import pytest

from trio_nsq.protocol.address import (
    format_address,
    format_peer,
    is_ip_peer,
    parse_address,
    without_secrets,
)


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("127.0.0.1:4150", ("127.0.0.1", 4150)),
        ("localhost:1", ("localhost", 1)),
        ("nsq-1.example.org:65535", ("nsq-1.example.org", 65535)),
        ("[::1]:4150", ("::1", 4150)),
        ("[fe80::1%eth0]:4150", ("fe80::1%eth0", 4150)),
        ("host:00080", ("host", 80)),
    ],
)
def test_addresses_with_a_port(text: str, parsed: tuple[str, int]) -> None:
    assert parse_address(text) == parsed
    assert parse_address(text, default_port=9) == parsed
    assert parse_address(format_address(*parsed)) == parsed


@pytest.mark.parametrize(("text", "host"), [("localhost", "localhost"), ("[::1]", "::1")])
def test_default_port_is_for_addresses_without_one(text: str, host: str) -> None:
    assert parse_address(text, default_port=4150) == (host, 4150)
    with pytest.raises(ValueError, match="no port"):
        parse_address(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        ":4150",
        "[]:4150",
        "host:",
        "host:0",
        "host:65536",
        "host:-1",
        "host:+1",
        "host: 1",
        "host:1 ",
        "host:1_0",
        "host:٣",
        "host:0000080",
        "host:http",
        "::1:4150",
        "::1",
        "[::1",
        "[::1]4150",
        "[::1]:",
        "my host:4150",
        "http://host:4150",
    ],
)
def test_invalid_address_is_refused_with_its_text(text: str) -> None:
    for default_port in (None, 4150):
        with pytest.raises(ValueError) as caught:
            parse_address(text, default_port)
        assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", ["http://host:4150", "tcp://[::1]:4150", "https://host"])
def test_scheme_is_what_the_error_names(text: str) -> None:
    with pytest.raises(
        ValueError, match=rf"has a scheme; write it as host:port, without {text.partition(':')[0]}://"
    ):
        parse_address(text)


@pytest.mark.parametrize(
    ("address", "text"),
    [
        (("127.0.0.1", 4150), "127.0.0.1:4150"),
        (("::1", 4150, 0, 0), "[::1]:4150"),
        ("", "@"),
        (b"", "@"),
        ("/run/client.sock", "/run/client.sock"),
        (b"\0name", "@name"),
        (b"\0a\0b\xff", r"'@a\x00b\\xff'"),
        ("/tmp/a\nb\x1b[31m", r"'/tmp/a\nb\x1b[31m'"),
    ],
)
def test_peers_are_shown_as_in_nsqd(
    address: tuple[str, int] | tuple[str, int, int, int] | str | bytes, text: str
) -> None:
    assert format_peer(address) == text


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("127.0.0.1:80", "127.0.0.1:80"),
        ("http://127.0.0.1:80/auth", "http://127.0.0.1:80/auth"),
        ("http://user:secret@host:80/auth", "http://xxxxx@host:80/auth"),
        ("http://secret@host", "http://xxxxx@host"),
        ("http://user:se/cr@et@host/auth", "http://xxxxx@host/auth"),
        ("user:secret@host:80", "xxxxx@host:80"),
        ("http://host/auth?token=secret", "http://host/auth?xxxxx"),
        ("", ""),
    ],
)
def test_password_in_a_url_is_hidden(url: str, shown: str) -> None:
    assert without_secrets(url) == shown


@pytest.mark.parametrize(
    ("text", "is_valid"),
    [
        ("127.0.0.1:1", True),
        ("255.255.255.255:65535", True),
        ("[::1]:4150", True),
        ("[::ffff:1.2.3.4]:4150", True),
        ("[fe80::1%eth0]:4150", True),
        ("[fe80::1%en.0_a-b]:4150", True),
        ("", False),
        ("127.0.0.1", False),
        ("127.0.0.1:", False),
        ("127.0.0.1:0", False),
        ("127.0.0.1:01", False),
        ("127.0.0.1:65536", False),
        ("127.0.0.1:+1", False),
        ("127.0.0.1:1 ", False),
        ("127.0.0.1:1\n", False),
        ("127.0.0.1:\u0661", False),
        ("127.0.0.1%eth0:1", False),
        ("127.1:1", False),
        ("0177.0.0.1:1", False),
        ("localhost:1", False),
        ("::1:4150", False),
        ("[::1:4150", False),
        ("[127.0.0.1]:4150", False),
        ("[fe80::1%]:4150", False),
        ("[fe80::1%a b]:4150", False),
        ("[fe80::1%a\n]:4150", False),
        ("[fe80::1%0123456789abcdef]:4150", False),
        ("@", False),
    ],
)
def test_addresses_of_ip_peers(text: str, is_valid: bool) -> None:
    assert is_ip_peer(text) is is_valid
